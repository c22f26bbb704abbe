//! Counts statements to Postgres, and loses planned statements or their answers.

use std::collections::HashMap;
use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::sync::watch;

use crate::{Ended, Harm};

/// The fate of a connection at the planned statement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lose {
    /// It ends before the statement reaches the server.
    Statement,
    /// It ends while the statement is on its way: the outcome is unknown.
    Connection,
    /// It ends after the server executed the statement, and before a byte of the answer.
    Answer,
    /// It ends after the server executed the statement; a pooler's error with this SQLSTATE replaces the answer.
    AnswerForError(&'static str),
    /// The server executes the statement; the client sees neither an answer nor an end.
    EverythingSilently,
    /// It continues, but its session has forgotten its prepared statements.
    Preparations,
}

#[derive(Debug)]
struct Plan {
    lose: Lose,
    marker: &'static str,
    times: usize,
}

/// The message type of a simple query.
const QUERY: u8 = b'Q';

/// The message type that prepares a statement.
const PARSE: u8 = b'P';

/// The first message of the execution of a prepared statement with arguments; the last is [`SYNC`].
const BIND: u8 = b'B';

const SYNC: u8 = b'S';

/// Counts statements, and loses those that [`Losses::lose`] plans.
#[derive(Debug, Default)]
pub struct Losses {
    plan: Mutex<Option<Plan>>,
    statements: AtomicUsize,
    preparations: AtomicUsize,
    connections: AtomicUsize,
    ignores_options: AtomicBool,
    /// The delay of each answer, in milliseconds.
    latency: AtomicU64,
}

impl Losses {
    /// Loses the next `times` statements that contain `marker`.
    pub fn lose(&self, lose: Lose, marker: &'static str, times: usize) {
        *self.plan.lock().unwrap() = Some(Plan { lose, marker, times });
    }

    /// Whether all planned losses happened.
    #[must_use]
    pub fn has_lost(&self) -> bool {
        self.plan.lock().unwrap().as_ref().is_none_or(|plan| plan.times == 0)
    }

    /// How many statements were sent to the server.
    #[must_use]
    pub fn statements(&self) -> usize {
        self.statements.load(Ordering::SeqCst)
    }

    /// How many statements were prepared.
    #[must_use]
    pub fn preparations(&self) -> usize {
        self.preparations.load(Ordering::SeqCst)
    }

    /// How many connections were made.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }

    /// From now on, removes start-up options from what reaches the server.
    pub fn ignore_options(&self) {
        self.ignores_options.store(true, Ordering::SeqCst);
    }

    /// From now on, delays each answer.
    pub fn delay(&self, by: Duration) {
        self.latency.store(u64::try_from(by.as_millis()).unwrap(), Ordering::SeqCst);
    }

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

impl Harm for Losses {
    fn accepts(&self) -> bool {
        self.connections.fetch_add(1, Ordering::SeqCst);
        true
    }

    async fn carry(&self, client: &mut TcpStream, server: &mut TcpStream) -> io::Result<Ended> {
        let ((from_client, to_client), (from_server, to_server)) = (client.split(), server.split());
        let (mute, muted) = watch::channel(None);
        tokio::select! {
            ended = requests(self, from_client, to_server, mute) => ended?,
            ended = answers(self, from_server, to_client, muted) => ended?,
        }
        Ok(Ended::Closed)
    }
}

async fn requests(
    losses: &Losses,
    mut client: ReadHalf<'_>,
    mut server: WriteHalf<'_>,
    mute: watch::Sender<Option<Lose>>,
) -> io::Result<()> {
    // The first message has no type byte.
    let start = message(&mut client, None).await?;
    let ignores = losses.ignores_options.load(Ordering::SeqCst);
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
                losses.preparations.fetch_add(1, Ordering::SeqCst);
                None
            }
            BIND => Some(names.get(words(&message).1).cloned().unwrap_or_default()),
            _ => None,
        };
        let lose = text.and_then(|text| losses.planned(&text));
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

/// Removes the options from a start-up message: a length, a version, and names with values.
fn without_options(start: &[u8]) -> Vec<u8> {
    const HEAD: usize = 8;
    let words: Vec<_> = start[HEAD..].split_inclusive(|byte| *byte == 0).collect();
    let others = words.chunks(2).filter(|pair| pair[0] != b"options\0").flatten().copied();
    let parameters = others.collect::<Vec<_>>().concat();
    let length = u32::try_from(HEAD + parameters.len()).unwrap();
    [&length.to_be_bytes(), &start[4..HEAD], &parameters].concat()
}

/// The first two zero-terminated strings of a message.
fn words(message: &[u8]) -> (&[u8], &[u8]) {
    let mut words = message[5..].split(|byte| *byte == 0);
    (words.next().unwrap_or_default(), words.next().unwrap_or_default())
}

/// Rewrites a message for a session that has forgotten its prepared statements.
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

/// Reads a whole message: its type, if it has one, its length, and its body.
async fn message(client: &mut ReadHalf<'_>, kind: Option<u8>) -> io::Result<Vec<u8>> {
    let length = client.read_u32().await?;
    let mut message: Vec<u8> = kind.into_iter().chain(length.to_be_bytes()).collect();
    let head = message.len();
    message.resize(head + length as usize - 4, 0);
    client.read_exact(&mut message[head..]).await?;
    Ok(message)
}

/// Builds an `ErrorResponse` with severity, SQLSTATE and message.
fn error(state: &str) -> Vec<u8> {
    let fields = format!("SERROR\0VERROR\0C{state}\0Mthe pooler has lost the server\0\0");
    let length = u32::try_from(4 + fields.len()).unwrap();
    [b"E", &length.to_be_bytes()[..], fields.as_bytes()].concat()
}

async fn answers(
    losses: &Losses,
    mut server: ReadHalf<'_>,
    mut client: WriteHalf<'_>,
    muted: watch::Receiver<Option<Lose>>,
) -> io::Result<()> {
    /// `ReadyForQuery`, without the transaction state.
    const READY: [u8; 5] = [b'Z', 0, 0, 0, 5];
    let (mut buffer, mut swallowed) = (vec![0; 64 * 1024], Vec::new());
    loop {
        let read = server.read(&mut buffer).await?;
        tokio::time::sleep(Duration::from_millis(losses.latency.load(Ordering::SeqCst))).await;
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
