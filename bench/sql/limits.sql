-- The project's record without the project: for what Postgres takes at least for one.
-- A plan that is kept from when the table was empty would read all of it.
ALTER DATABASE postgres SET enable_seqscan = off;
CREATE TABLE same_records (LIKE idem.idem_records INCLUDING ALL) WITH (fillfactor = 25);
