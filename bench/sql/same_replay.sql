\set number random(1, 10000 - 1)
SELECT clock.at, known.* FROM (SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::BIGINT AS at OFFSET 0) AS clock LEFT JOIN LATERAL (SELECT one.xmin, one.* FROM idem.idem_records AS one WHERE one.id = sha256(int8send(:number)) OFFSET 0) AS known ON TRUE;
