//! A TCP proxy that counts statements, and loses messages or answers when it is told to.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// What becomes of a connection at the statement that was waited for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Lose {
    /// It ends before the statement reaches the server.
    Statement,
    /// It ends with the statement on its way: nobody knows whether it is done.
    Connection,
    /// It ends after the server did the statement, and before a byte of the answer.
    Answer,
    /// It ends after the server did the statement, with an error of this state for an answer, as a pooler gives one.
    AnswerForError(&'static str),
    /// The server does the statement, and neither an answer nor an end is ever seen.
    EverythingSilently,
    /// The connection goes on; its session has forgotten its prepared statements.
    Preparations,
}

struct Plan {
    lose: Lose,
    marker: &'static str,
    times: usize,
}

/// A statement as text.
const QUERY: u8 = b'Q';

/// A statement gets a name.
const PARSE: u8 = b'P';

/// The first message of those that do what has a name, with arguments; the last is [`SYNC`].
const BIND: u8 = b'B';

const SYNC: u8 = b'S';

struct Shared {
    upstream: AtomicU16,
    plan: Mutex<Option<Plan>>,
    statements: AtomicUsize,
    preparations: AtomicUsize,
    connections: AtomicUsize,
    ignores_options: AtomicBool,
    /// How many milliseconds each answer takes on its way.
    latency: AtomicU64,
    /// Changes when all connections are to end.
    end: watch::Sender<()>,
}

pub struct Proxy {
    pub port: u16,
    shared: Arc<Shared>,
    task: JoinHandle<()>,
}

impl Proxy {
    /// In front of the server at `upstream` on this machine.
    pub async fn start(upstream: u16) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let shared = Arc::new(Shared {
            upstream: upstream.into(),
            plan: Mutex::new(None),
            statements: AtomicUsize::new(0),
            preparations: AtomicUsize::new(0),
            connections: AtomicUsize::new(0),
            ignores_options: AtomicBool::new(false),
            latency: AtomicU64::new(0),
            end: watch::Sender::new(()),
        });
        let carrier = Arc::clone(&shared);
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                carrier.connections.fetch_add(1, Ordering::SeqCst);
                tokio::spawn(carry(Arc::clone(&carrier), client));
            }
        });
        Self { port, shared, task }
    }

    /// Loses what the next `times` statements bring in which `marker` stands.
    pub fn lose(&self, lose: Lose, marker: &'static str, times: usize) {
        *self.shared.plan.lock().unwrap() = Some(Plan { lose, marker, times });
    }

    /// Whether everything was lost that should be.
    pub fn has_lost(&self) -> bool {
        self.shared.plan.lock().unwrap().as_ref().is_none_or(|plan| plan.times == 0)
    }

    /// How many statements went to the server.
    pub fn statements(&self) -> usize {
        self.shared.statements.load(Ordering::SeqCst)
    }

    /// How many statements got a name.
    pub fn preparations(&self) -> usize {
        self.shared.preparations.load(Ordering::SeqCst)
    }

    /// How many connections were made.
    pub fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::SeqCst)
    }

    /// From now on, start-up options do not reach the server.
    pub fn ignore_options(&self) {
        self.shared.ignores_options.store(true, Ordering::SeqCst);
    }

    /// From now on, each answer is so much later.
    pub fn delay(&self, by: Duration) {
        self.shared.latency.store(u64::try_from(by.as_millis()).unwrap(), Ordering::SeqCst);
    }

    /// New connections lead elsewhere from now on.
    pub fn lead_to(&self, upstream: u16) {
        self.shared.upstream.store(upstream, Ordering::SeqCst);
    }

    /// Ends all connections.
    pub fn cut(&self) {
        self.shared.end.send_replace(());
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
        self.cut();
    }
}

async fn carry(shared: Arc<Shared>, client: TcpStream) {
    let mut end = shared.end.subscribe();
    let Ok(server) = TcpStream::connect(("127.0.0.1", shared.upstream.load(Ordering::SeqCst))).await else { return };
    for stream in [&client, &server] {
        stream.set_nodelay(true).unwrap();
    }
    let ((from_client, to_client), (from_server, to_server)) = (client.into_split(), server.into_split());
    let (mute, muted) = watch::channel(None);
    tokio::select! {
        _ = requests(&shared, from_client, to_server, mute) => {}
        _ = answers(&shared, from_server, to_client, muted) => {}
        _ = end.changed() => {}
    }
    // Both sides see the end of the connection.
}

async fn requests(
    shared: &Shared,
    mut client: OwnedReadHalf,
    mut server: OwnedWriteHalf,
    mute: watch::Sender<Option<Lose>>,
) -> io::Result<()> {
    // The first message has no type.
    let start = message(&mut client, None).await?;
    let ignores = shared.ignores_options.load(Ordering::SeqCst);
    server.write_all(&if ignores { without_options(&start) } else { start }).await?;
    let mut names = HashMap::new();
    loop {
        let kind = client.read_u8().await?;
        let mut message = message(&mut client, Some(kind)).await?;
        let text = match kind {
            QUERY => Some(message[5..].to_vec()),
            PARSE => {
                let (name, text) = words(&message);
                names.insert(name.to_vec(), text.to_vec());
                shared.preparations.fetch_add(1, Ordering::SeqCst);
                None
            }
            BIND => Some(names.get(words(&message).1).cloned().unwrap_or_default()),
            _ => None,
        };
        let lose = text.and_then(|text| shared.planned(&text));
        if kind == BIND && lose.is_some() {
            loop {
                let kind = client.read_u8().await?;
                message.extend(self::message(&mut client, Some(kind)).await?);
                if kind == SYNC {
                    break;
                }
            }
        }
        match lose {
            Some(Lose::Statement) => return Ok(()),
            Some(lose @ (Lose::Answer | Lose::AnswerForError(_) | Lose::EverythingSilently)) => {
                mute.send_replace(Some(lose));
                server.write_all(&message).await?;
            }
            Some(Lose::Preparations) => server.write_all(&forgotten(kind, message)).await?,
            Some(Lose::Connection) => return server.write_all(&message).await,
            None => server.write_all(&message).await?,
        }
    }
}

/// A start-up message without the options in it: the length, the version, and names with their values.
fn without_options(start: &[u8]) -> Vec<u8> {
    const HEAD: usize = 8;
    let words: Vec<_> = start[HEAD..].split_inclusive(|byte| *byte == 0).collect();
    let others = words.chunks(2).filter(|pair| pair[0] != b"options\0").flatten().copied();
    let parameters = others.collect::<Vec<_>>().concat();
    let length = u32::try_from(HEAD + parameters.len()).unwrap();
    [&length.to_be_bytes(), &start[4..HEAD], &parameters].concat()
}

/// What stands before the first and the second zero of a message.
fn words(message: &[u8]) -> (&[u8], &[u8]) {
    let mut words = message[5..].split(|byte| *byte == 0);
    (words.next().unwrap_or_default(), words.next().unwrap_or_default())
}

/// The same, asked of a session that does not know any more what it has prepared.
fn forgotten(kind: u8, mut statement: Vec<u8>) -> Vec<u8> {
    const FIRST: &str = "DEALLOCATE ALL;";
    if kind == BIND {
        let (portal, name) = words(&statement);
        let (start, length) = (5 + portal.len() + 1, name.len());
        statement[start..start + length].fill(b'x');
        return statement;
    }
    let (head, text) = statement.split_at(5);
    let length = u32::try_from(head.len() - 1 + FIRST.len() + text.len()).unwrap();
    [&head[..1], &length.to_be_bytes(), FIRST.as_bytes(), text].concat()
}

/// A whole message: its type, if it has one, its length, its body.
async fn message(client: &mut OwnedReadHalf, kind: Option<u8>) -> io::Result<Vec<u8>> {
    let length = client.read_u32().await?;
    let mut message: Vec<u8> = kind.into_iter().chain(length.to_be_bytes()).collect();
    let head = message.len();
    message.resize(head + length as usize - 4, 0);
    client.read_exact(&mut message[head..]).await?;
    Ok(message)
}

impl Shared {
    fn planned(&self, text: &[u8]) -> Option<Lose> {
        self.statements.fetch_add(1, Ordering::SeqCst);
        let mut plan = self.plan.lock().unwrap();
        let plan = plan.as_mut().filter(|plan| plan.times > 0)?;
        let marker = plan.marker.as_bytes();
        let is_there = marker.is_empty() || text.windows(marker.len()).any(|window| window == marker);
        is_there.then(|| {
            plan.times -= 1;
            plan.lose
        })
    }
}

/// `ErrorResponse` with its severity, its state and its message.
fn error(state: &str) -> Vec<u8> {
    let fields = format!("SERROR\0VERROR\0C{state}\0Mthe pooler has lost the server\0\0");
    let length = u32::try_from(4 + fields.len()).unwrap();
    [b"E", &length.to_be_bytes()[..], fields.as_bytes()].concat()
}

async fn answers(
    shared: &Shared,
    mut server: OwnedReadHalf,
    mut client: OwnedWriteHalf,
    muted: watch::Receiver<Option<Lose>>,
) -> io::Result<()> {
    /// `ReadyForQuery`, but for the state of the transaction.
    const READY: [u8; 5] = [b'Z', 0, 0, 0, 5];
    let (mut buffer, mut swallowed) = (vec![0; 64 * 1024], Vec::new());
    loop {
        let read = server.read(&mut buffer).await?;
        tokio::time::sleep(Duration::from_millis(shared.latency.load(Ordering::SeqCst))).await;
        let muted = *muted.borrow();
        match muted {
            _ if read == 0 => return Ok(()),
            None => client.write_all(&buffer[..read]).await?,
            Some(lose) => {
                swallowed.extend_from_slice(&buffer[..read]);
                let done = swallowed.len().checked_sub(6).is_some_and(|from| swallowed[from..].starts_with(&READY));
                match lose {
                    Lose::Answer if done => return Ok(()),
                    Lose::AnswerForError(state) if done => return client.write_all(&error(state)).await,
                    _ => {}
                }
            }
        }
    }
}
