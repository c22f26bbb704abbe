//! Clients: they send requests, and record every answer in the history.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::{HeaderMap, Request};
use hyper_util::rt::TokioIo;
use idem_faults::{Answer, Key, Operation, Payment, Random};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

use crate::Error;
use crate::world::World;

/// Tenants, all of which use the same keys.
pub(crate) const TENANTS: u32 = 5;

/// Per thousand requests: repeats of an earlier key, altered bodies, and slow handlers. A slow handler takes 0.2 to 5 leases.
const REPEATS: u64 = 200;
const ALTERED: u64 = 50;
const SLOW: u64 = 4;

/// Per thousand requests: bodies that span many packets. Below, their greatest size in bytes.
const BIG: u64 = 20;
const BIGGEST: u64 = 200_000;

/// The client's timeout, longer than any answer may take.
const PATIENCE: Duration = Duration::from_secs(20);

/// How long a client retries a request during the faults. Unanswered requests are sent again after the last fault.
const STUBBORNNESS: Duration = Duration::from_secs(8);

/// How long a client retries a request after the last fault.
pub(crate) const LONGEST: Duration = Duration::from_secs(60);

/// The text that a handler logs when it begins; the name of its key follows.
const BEGUN: &str = "begun:";

/// Header fields that may differ in a replay.
const OF_THE_MOMENT: [&str; 6] = [
    "connection",
    "content-length",
    "date",
    "idempotency-replayed",
    // Only the first answer knows with which retention its record is settled.
    "idempotency-retention",
    "transfer-encoding",
];

pub(crate) struct Client {
    world: Arc<World>,
    random: Random,
    connections: Vec<Option<SendRequest<Full<Bytes>>>>,
}

impl Client {
    pub(crate) fn new(world: Arc<World>, random: Random) -> Self {
        let connections = world.ports.iter().map(|_| None).collect();
        Self { world, random, connections }
    }

    /// Requests many keys, some of them more than once.
    pub(crate) async fn work(mut self) {
        while !self.world.over.load(Ordering::Relaxed) {
            let (key, amount) = self.choose();
            self.insist(&key, amount, STUBBORNNESS).await;
        }
    }

    /// Requests one key, for which many clients ask at once.
    pub(crate) async fn storm(mut self, key: Key) {
        let amount = self.world.amount_of(&key);
        self.insist(&key, amount, STUBBORNNESS).await;
    }

    fn choose(&mut self) -> (Key, i64) {
        let keys = self.world.keys.load(Ordering::Relaxed);
        let is_repeat = keys > 0 && self.random.chance(REPEATS);
        let number =
            if is_repeat { keys - 1 - self.random.zipf(keys) } else { self.world.keys.fetch_add(1, Ordering::Relaxed) };
        let key = Key { tenant: self.random.below(u64::from(TENANTS)) as u32, key: number };
        let amount = self.world.amount_of(&key) + i64::from(self.random.chance(ALTERED));
        (key, amount)
    }

    /// Retries until there is a definite answer, which it returns, or until `patience` is over. After the last fault it retries
    /// for up to `LONGEST`.
    pub(crate) async fn insist(&mut self, key: &Key, amount: i64, patience: Duration) -> Option<Answer> {
        let began = Instant::now();
        let world = Arc::clone(&self.world);
        let goes_on = || world.over.load(Ordering::Relaxed) && began.elapsed() < LONGEST;
        while began.elapsed() < patience || goes_on() {
            while world.hush.load(Ordering::Relaxed) {
                sleep(Duration::from_millis(2)).await;
            }
            let answer = self.ask(key, amount).await;
            match answer {
                Some(answer) if answer.is_definite() => return Some(answer),
                _ => sleep(Duration::from_millis(5 + self.random.below(60))).await,
            }
        }
        None
    }

    /// Sends one request and records it in the history.
    async fn ask(&mut self, key: &Key, amount: i64) -> Option<Answer> {
        let service = self.random.below(self.connections.len() as u64) as usize;
        let request = self.request(key, amount);
        let began = self.world.started.elapsed();
        let answer = match timeout(PATIENCE, self.send(service, request)).await {
            Ok(Ok(received)) => Some(received.read(key, amount)),
            Ok(Err(_)) | Err(_) => {
                self.connections[service] = None;
                None
            }
        };
        let ended = self.world.started.elapsed();
        let operation = Operation { key: key.clone(), amount, began, ended, answer: answer.clone() };
        self.world.history.lock().unwrap_or_else(PoisonError::into_inner).push(operation);
        answer
    }

    fn request(&mut self, key: &Key, amount: i64) -> Request<Full<Bytes>> {
        let recipient = format!("tenant-{} key-{}", key.tenant, key.key);
        let mut body = serde_json::json!({ "amount": amount, "currency": "EUR", "recipient": recipient }).to_string();
        if self.random.chance(BIG) {
            // Blanks do not make it another request.
            body.extend(std::iter::repeat_n(' ', self.random.below(BIGGEST) as usize));
        }
        let delay = if self.random.chance(SLOW) {
            let lease = self.world.lease.as_millis() as u64;
            lease / 5 + self.random.below(lease * 24 / 5)
        } else {
            self.random.below(15)
        };
        let shape = match self.random.below(40) {
            0 => ",stream=200000",
            1 => ",body=20000",
            _ => "",
        };
        let mut request = Request::new(Full::from(body));
        *request.method_mut() = hyper::Method::POST;
        *request.uri_mut() = hyper::Uri::from_static("/v1/payments");
        let fields = [
            ("host", "payments".to_owned()),
            ("authorization", format!("Bearer tenant-{}", key.tenant)),
            ("content-type", "application/json".to_owned()),
            ("idempotency-key", format!("key-{}", key.key)),
            ("x-simulate", format!("say={}{},delay-before={delay}{shape}", BEGUN, name(key))),
        ];
        for (name, value) in fields {
            if let Ok(value) = value.parse() {
                request.headers_mut().insert(name, value);
            }
        }
        request
    }

    async fn send(&mut self, service: usize, request: Request<Full<Bytes>>) -> Result<Received, Error> {
        let place = &mut self.connections[service];
        let connection = match place {
            Some(connection) => connection,
            None => {
                let stream = TcpStream::connect(("127.0.0.1", self.world.ports[service])).await?;
                stream.set_nodelay(true)?;
                let (sender, connection) = handshake(TokioIo::new(stream)).await?;
                // Ends when either side closes, which the next request notices.
                tokio::spawn(connection);
                place.insert(sender)
            }
        };
        connection.ready().await?;
        let (head, body) = connection.send_request(request).await?.into_parts();
        Ok(Received { status: head.status.as_u16(), headers: head.headers, body: body.collect().await?.to_bytes() })
    }
}

/// Describes what the services have not finished after the last request. The list must be empty soon.
pub(crate) async fn still_running(world: &Arc<World>) -> Result<Vec<String>, Error> {
    let give_up_at = Instant::now() + STUBBORNNESS;
    let mut client = Client::new(Arc::clone(world), Random::new(0));
    loop {
        let mut left = Vec::new();
        for service in 0..world.ports.len() {
            for tenant in 0..TENANTS {
                let mut request = Request::new(Full::default());
                *request.uri_mut() = hyper::Uri::from_static("/v1/running");
                request.headers_mut().insert("host", "payments".parse()?);
                request.headers_mut().insert("authorization", format!("Bearer tenant-{tenant}").parse()?);
                let received = client.send(service, request).await?;
                let document: serde_json::Value = serde_json::from_slice(&received.body)?;
                let stages = ["open", "before", "after", "sending", "waiting"];
                let counts = stages.map(|stage| document[stage].as_u64());
                if counts != [Some(0); 5] {
                    left.push(format!("service {service} is not done with tenant {tenant}: {document}"));
                }
            }
        }
        if left.is_empty() || Instant::now() > give_up_at {
            return Ok(left);
        }
        sleep(Duration::from_millis(100)).await;
    }
}

struct Received {
    status: u16,
    headers: HeaderMap,
    body: Bytes,
}

impl Received {
    fn field(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    fn read(&self, key: &Key, amount: i64) -> Answer {
        let is_json = self.field("content-type").is_some_and(|media_type| media_type.contains("json"));
        let document: serde_json::Value =
            if is_json { serde_json::from_slice(&self.body).unwrap_or_default() } else { serde_json::Value::Null };
        let problem = document["type"].as_str().and_then(|uri| uri.split_once("idem_http/problem/index.html#"));
        Answer {
            status: self.status,
            is_replay: self.headers.contains_key("idempotency-replayed"),
            problem: problem.map(|(_, kind)| kind.to_owned()),
            digest: self.digest(),
            payment: self.payment(&document, key, amount),
        }
    }

    /// Reads the payment. If the body is a stream without key and amount, it takes those of the request.
    fn payment(&self, document: &serde_json::Value, key: &Key, amount: i64) -> Option<Payment> {
        let id = self.field("location")?.rsplit('/').next()?.to_owned();
        let attempt = self.field("x-attempt")?.parse().ok()?;
        let key = document["recipient"].as_str().map_or_else(|| Some(key.clone()), read_recipient)?;
        Some(Payment { id, key, amount: document["amount"].as_i64().unwrap_or(amount), attempt })
    }

    fn digest(&self) -> u64 {
        let mut fields = BTreeMap::<&str, Vec<&[u8]>>::new();
        for (name, value) in &self.headers {
            if !OF_THE_MOMENT.contains(&name.as_str()) {
                fields.entry(name.as_str()).or_default().push(value.as_bytes());
            }
        }
        let mut digest = DefaultHasher::new();
        (self.status, fields, &self.body).hash(&mut digest);
        digest.finish()
    }
}

fn name(key: &Key) -> String {
    format!("{}-{}", key.tenant, key.key)
}

/// The keys whose handler has begun, according to the log of a service.
pub(crate) fn begun(log: &str) -> impl Iterator<Item = Key> {
    log.split(BEGUN).skip(1).filter_map(|rest| {
        let length = rest.find(|end: char| end != '-' && !end.is_ascii_digit())?;
        let (tenant, key) = rest[..length].split_once('-')?;
        Some(Key { tenant: tenant.parse().ok()?, key: key.parse().ok()? })
    })
}

/// The key for which a payment was made, parsed from the name of its recipient.
pub(crate) fn read_recipient(recipient: &str) -> Option<Key> {
    let (tenant, key) = recipient.strip_prefix("tenant-")?.split_once(" key-")?;
    Some(Key { tenant: tenant.parse().ok()?, key: key.parse().ok()? })
}
