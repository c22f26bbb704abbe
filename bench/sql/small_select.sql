\set number random(1, 100000 - 1)
SELECT * FROM small.idem_records WHERE id = sha256(int8send(:number));
