\set number random(1, 10000000 - 1)
SELECT * FROM large.idem_records WHERE id = sha256(int8send(:number));
