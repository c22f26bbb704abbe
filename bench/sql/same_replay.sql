\set number random(1, 10000 - 1)
SELECT * FROM idem.idem_acquire_v1(0, ARRAY[sha256(int8send(:number))], ARRAY[:number]::BIGINT[], ARRAY['bench'::BYTEA], ARRAY['tenant-4711'::BYTEA], ARRAY['POST /pay'::BYTEA], ARRAY[1]::BIGINT[], ARRAY[1]::BIGINT[], ARRAY[sha256('f')], ARRAY['\x00112233445566778899aabbccddeeff'::BYTEA], ARRAY[1]::BIGINT[], ARRAY[30000000]::BIGINT[], ARRAY[86400000000]::BIGINT[]);
