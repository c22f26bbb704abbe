//! A server under test, from the view of one case.

use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use uuid::Uuid;

use crate::client::{Answer, Request};
use crate::eventually;
use crate::exchange::{Exchange, Line, Protocol};
use crate::transcript::Entry;

/// The promise across a crash, which decides what some answers must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_enums, reason = "cases must know what each contract promises")]
pub enum Contract {
    /// Payment, ledger row and answer commit in one transaction.
    Transactional,
    /// Nothing runs twice.
    AtMostOnce,
    /// An operation runs again after a fault and a backoff.
    AtLeastOnce,
}

impl Contract {
    /// All of them, the strongest first.
    pub const ALL: [Self; 3] = [Self::Transactional, Self::AtMostOnce, Self::AtLeastOnce];
    /// The contracts under which a record shows a running request.
    pub const LEASED: [Self; 2] = [Self::AtMostOnce, Self::AtLeastOnce];

    /// Its name on the command line and on the health page.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Transactional => "transactional",
            Self::AtMostOnce => "at-most-once",
            Self::AtLeastOnce => "at-least-once",
        }
    }
}

/// Counts of the tenant's requests by stage, as the server reports them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stages {
    /// Requests that the server has not answered.
    pub(crate) open: u64,
    /// Runs before their effect.
    pub(crate) before: u64,
    /// Runs after their effect.
    pub(crate) after: u64,
    /// Answers whose body is still being produced.
    pub(crate) sending: u64,
    /// Requests of all tenants that wait for another run.
    pub(crate) waiting: u64,
    /// The memory of the server process, if the system reports it.
    pub(crate) memory_bytes: Option<u64>,
}

/// The server and a tenant that only this case uses, so that cases can run concurrently on one server.
#[derive(Debug)]
pub struct Target {
    address: SocketAddr,
    contract: Contract,
    protocol: Protocol,
    tenant: String,
    transcript: Mutex<Vec<Entry>>,
}

impl Target {
    /// Makes the target of one case, over one protocol.
    #[must_use]
    pub fn new(address: SocketAddr, contract: Contract, protocol: Protocol) -> Self {
        let tenant = format!("tenant-{}", Uuid::new_v4().simple());
        Self { address, contract, protocol, tenant, transcript: Mutex::default() }
    }

    /// The address of the server.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The contract of the server.
    #[must_use]
    pub fn contract(&self) -> Contract {
        self.contract
    }

    /// The protocol of the requests.
    #[must_use]
    pub fn protocol(&self) -> Protocol {
        self.protocol
    }

    /// The tenant of the case.
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

    /// Sends a request, and adds the answer to the transcript.
    #[must_use]
    pub fn send(&self, request: &Request) -> Answer {
        self.note(self.ask(request))
    }

    /// Sends a request without adding the answer to the transcript.
    ///
    /// # Panics
    /// If there is no answer.
    #[must_use]
    pub fn ask(&self, request: &Request) -> Answer {
        self.ask_by(self.protocol, request)
    }

    /// Sends a request over this protocol, without adding the answer to the transcript.
    pub(crate) fn ask_by(&self, protocol: Protocol, request: &Request) -> Answer {
        let answer = Exchange::begin(protocol, self.address, request).answer();
        answer.unwrap_or_else(|| panic!("no answer over {} to {request:?}", protocol.name()))
    }

    /// Sends a request on a new connection, without reading the answer.
    pub(crate) fn begin(&self, request: &Request) -> Exchange {
        Exchange::begin(self.protocol, self.address, request)
    }

    /// Sends the head of a request, with or without a declared length.
    pub(crate) fn upload(&self, request: &Request, declared_bytes: Option<usize>) -> Exchange {
        Exchange::upload(self.protocol, self.address, request, declared_bytes)
    }

    /// Opens a persistent connection.
    pub(crate) fn connect(&self) -> Line {
        Line::open(self.protocol, self.address)
    }

    /// Adds an answer to the transcript that was read elsewhere. Leave out answers that depend on timing.
    #[must_use]
    pub fn note(&self, answer: Answer) -> Answer {
        // This checks every problem document.
        let _ = answer.problem();
        let mut transcript = self.transcript.lock().unwrap_or_else(PoisonError::into_inner);
        transcript.push(Entry::of(&answer, &self.tenant));
        answer
    }

    /// The answers that the case noted.
    #[must_use]
    pub fn into_transcript(self) -> Vec<Entry> {
        self.transcript.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of payments whose money really moved.
    ///
    /// # Panics
    /// If the server does not report it.
    #[must_use]
    pub fn effects(&self) -> u64 {
        let answer = self.get("/v1/ledger").send(self.address);
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.json()["effects"].as_u64().unwrap()
    }

    pub(crate) fn stages(&self) -> Stages {
        let answer = self.get("/v1/running").send(self.address);
        assert_eq!(answer.status, 200, "is the server started with --simulate? {answer:?}");
        let running = answer.json();
        let count = |name: &str| running[name].as_u64().unwrap();
        Stages {
            open: count("open"),
            before: count("before"),
            after: count("after"),
            sending: count("sending"),
            waiting: count("waiting"),
            memory_bytes: running["memory_bytes"].as_u64(),
        }
    }

    /// Waits until `is_so`.
    pub(crate) fn await_stages(&self, what: &str, is_so: impl Fn(Stages) -> bool) {
        eventually(what, || is_so(self.stages()).then_some(()));
    }

    /// Waits until one run is held before its effect.
    pub fn await_run(&self) {
        self.await_stages("a run", |stages| (stages.before, stages.after) == (1, 0));
    }

    /// Waits until one run is held after its effect.
    pub fn await_effect(&self) {
        self.await_stages("an effect", |stages| (stages.before, stages.after) == (0, 1));
    }

    /// Waits until the server has finished every request of the tenant.
    pub fn await_quiet(&self) {
        self.await_stages("quiet", |stages| (stages.open, stages.before, stages.after, stages.sending) == (0, 0, 0, 0));
    }

    /// Whether a cache answers duplicates where it can.
    ///
    /// # Panics
    /// If the server does not report it.
    #[must_use]
    pub fn is_cached(&self) -> bool {
        self.get("/v1/running").send(self.address).json()["is_cached"].as_bool().unwrap()
    }

    /// Checks for a while that the held run still exists.
    ///
    /// # Panics
    /// If it was dropped.
    pub fn stays_held(&self) {
        for _ in 0..20 {
            let Stages { before, after, .. } = self.stages();
            assert_eq!(before + after, 1, "the run was dropped");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Releases held runs.
    ///
    /// # Panics
    /// If the server refuses.
    pub fn release(&self) {
        self.act("DELETE");
    }

    /// Makes the timeouts of held requests expire.
    ///
    /// # Panics
    /// If the server refuses.
    pub fn time_out(&self) {
        self.act("POST");
    }

    fn act(&self, method: &'static str) {
        let answer = self.get("/v1/running").method(method).send(self.address);
        assert_eq!(answer.status, 200, "{answer:?}");
    }
}
