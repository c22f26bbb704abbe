\set a random(1, 9000000000000000000)
BEGIN;
INSERT INTO ledger (account, amount, memo) VALUES (:a, 100, 'pay') RETURNING id;
COMMIT;
