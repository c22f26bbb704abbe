//! A server under test, as one case sees it.

use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use uuid::Uuid;

use crate::client::{Answer, Request};
use crate::eventually;
use crate::transcript::Entry;

/// What is promised across a crash; it decides what some answers have to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_enums, reason = "cases must know what each contract promises")]
pub enum Contract {
    /// Payment, ledger row and answer commit in one transaction.
    Transactional,
    /// Nothing runs twice.
    AtMostOnce,
    /// A fault runs again after a rest.
    AtLeastOnce,
}

impl Contract {
    /// All of them, the strongest first.
    pub const ALL: [Self; 3] = [Self::Transactional, Self::AtMostOnce, Self::AtLeastOnce];
    /// Those that know a running request by its record.
    pub const LEASED: [Self; 2] = [Self::AtMostOnce, Self::AtLeastOnce];

    /// Its name on the command line, and on the health page.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Transactional => "transactional",
            Self::AtMostOnce => "at-most-once",
            Self::AtLeastOnce => "at-least-once",
        }
    }
}

/// The server, and a tenant of the case's own, so that cases can run side by side on one server.
#[derive(Debug)]
pub struct Target {
    address: SocketAddr,
    contract: Contract,
    tenant: String,
    transcript: Mutex<Vec<Entry>>,
}

impl Target {
    /// For one case.
    #[must_use]
    pub fn new(address: SocketAddr, contract: Contract) -> Self {
        let tenant = format!("tenant-{}", Uuid::new_v4().simple());
        Self { address, contract, tenant, transcript: Mutex::default() }
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What it promises.
    #[must_use]
    pub fn contract(&self) -> Contract {
        self.contract
    }

    /// Whose payments the case makes.
    #[must_use]
    pub fn tenant(&self) -> &str {
        &self.tenant
    }

    /// A payment under `key`.
    #[must_use]
    pub fn pay(&self, key: &str) -> Request {
        Request::pay(key).tenant(&self.tenant)
    }

    /// A payment without a key.
    #[must_use]
    pub fn keyless(&self) -> Request {
        Request::keyless().tenant(&self.tenant)
    }

    /// A GET.
    #[must_use]
    pub fn get(&self, target: &str) -> Request {
        Request::get(target).tenant(&self.tenant)
    }

    /// Sends a request, and puts the answer into the transcript.
    #[must_use]
    pub fn send(&self, request: &Request) -> Answer {
        self.note(request.send(self.address))
    }

    /// Puts an answer into the transcript that was read in another way. Leave out what depends on who is faster.
    #[must_use]
    pub fn note(&self, answer: Answer) -> Answer {
        // Asked for here so that every problem document is checked.
        let _ = answer.problem();
        let mut transcript = self.transcript.lock().unwrap_or_else(PoisonError::into_inner);
        transcript.push(Entry::of(&answer, &self.tenant));
        answer
    }

    /// What was sent back to the case.
    #[must_use]
    pub fn into_transcript(self) -> Vec<Entry> {
        self.transcript.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    /// How often money really moved.
    ///
    /// # Panics
    /// When the server does not say.
    #[must_use]
    pub fn effects(&self) -> u64 {
        let answer = self.get("/v1/ledger").send(self.address);
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.json()["effects"].as_u64().unwrap()
    }

    /// How many runs are before their effect, and how many after it.
    fn stages(&self) -> (u64, u64) {
        let answer = self.get("/v1/running").send(self.address);
        assert_eq!(answer.status, 200, "is the server started with --simulate? {answer:?}");
        let running = answer.json();
        (running["before"].as_u64().unwrap(), running["after"].as_u64().unwrap())
    }

    /// Waits until one run is held before its effect.
    pub fn await_run(&self) {
        eventually("a run", || (self.stages() == (1, 0)).then_some(()));
    }

    /// Waits until one run is held after its effect.
    pub fn await_effect(&self) {
        eventually("an effect", || (self.stages() == (0, 1)).then_some(()));
    }

    /// Looks for a while whether the run that is held is there still.
    ///
    /// # Panics
    /// When it was dropped.
    pub fn stays_held(&self) {
        for _ in 0..20 {
            let (before, after) = self.stages();
            assert_eq!(before + after, 1, "the run was dropped");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Lets the run that is held go on.
    ///
    /// # Panics
    /// When the server does not.
    pub fn release(&self) {
        let answer = self.get("/v1/running").method("DELETE").send(self.address);
        assert_eq!(answer.status, 200, "{answer:?}");
    }
}
