//! Gates in a transaction of the server under test. A test decides when they open.

use std::sync::Arc;

use super::{Schemas, Sql, eventually};

/// A point where triggers block a transaction while the test holds a lock.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Gate {
    Insert = 1,
    Commit = 2,
}

/// The fate of a statement that is blocked at a gate when its client dies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Orphan {
    /// The gate opens at once, and the statement continues.
    GoesOn,
    /// The gate stays shut until Postgres ends the statement, because it notices the lost client or a timeout expires.
    IsGivenUp,
    /// Its session is terminated, as in a crash of Postgres.
    IsEnded,
}

impl Orphan {
    pub(crate) const ALL: [Self; 3] = [Self::GoesOn, Self::IsGivenUp, Self::IsEnded];
}

/// Both gates of one server's tables.
pub(crate) struct Gates {
    schemas: Arc<Schemas>,
    /// The session that holds a gate shut.
    holder: Sql,
    /// Separates the locks of concurrent tests.
    class: u32,
}

impl Gates {
    pub(crate) fn install(schemas: &Arc<Schemas>, class: u32) -> Self {
        let (payments, idem) = (&schemas.payments, &schemas.idem);
        schemas.sql.run(format!(
            "CREATE FUNCTION {payments}.pass() RETURNS trigger LANGUAGE plpgsql SET lock_timeout = 0 AS $$
             BEGIN
                 PERFORM pg_advisory_xact_lock_shared({class}, TG_ARGV[0]::INTEGER);
                 RETURN NULL;
             END $$;
             CREATE TRIGGER gate_1 AFTER INSERT ON {idem}.idem_records
                 FOR EACH ROW EXECUTE FUNCTION {payments}.pass(1);
             CREATE CONSTRAINT TRIGGER gate_2 AFTER INSERT ON {idem}.idem_records DEFERRABLE INITIALLY DEFERRED
                 FOR EACH ROW EXECUTE FUNCTION {payments}.pass(2);"
        ));
        Self { schemas: Arc::clone(schemas), holder: Sql::connect(), class }
    }

    pub(crate) fn shut(&self, gate: Gate) {
        self.holder.run(format!("SELECT pg_advisory_lock({}, {})", self.class, gate as i32));
    }

    /// The condition on `pg_locks` that finds sessions waiting at a gate.
    fn waiting(&self, gate: Gate) -> String {
        format!("locktype = 'advisory' AND classid = {} AND objid = {} AND NOT granted", self.class, gate as i32)
    }

    pub(crate) fn is_reached(&self, gate: Gate) -> bool {
        self.schemas.sql.number(format!("SELECT count(*) FROM pg_locks WHERE {}", self.waiting(gate))) == 1
    }

    /// Opens the gate for the orphan of a dead client, at the time that its fate demands.
    pub(crate) fn open(&self, gate: Gate, orphan: Orphan) {
        match orphan {
            Orphan::GoesOn => {}
            Orphan::IsGivenUp => eventually("the end of the orphan", || (!self.is_reached(gate)).then_some(())),
            Orphan::IsEnded => {
                let end = format!("SELECT pg_terminate_backend(pid, 10000) FROM pg_locks WHERE {}", self.waiting(gate));
                self.schemas.sql.run(end);
            }
        }
        self.holder.run(format!("SELECT pg_advisory_unlock({}, {})", self.class, gate as i32));
    }
}
