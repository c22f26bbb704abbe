//! A TCP proxy in front of a Redis server that loses commands or answers when it is told to.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// What becomes of a connection at the script that was waited for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Lose {
    /// It ends before the command reaches the server.
    Command,
    /// It ends after the server ran the script, and after so many bytes of the answer.
    AnswerFrom(usize),
    /// The server runs the script, and neither an answer nor an end is ever seen.
    EverythingSilently,
}

struct Plan {
    lose: Lose,
    times: usize,
}

pub struct Proxy {
    pub port: u16,
    plan: Arc<Mutex<Option<Plan>>>,
    task: JoinHandle<()>,
}

impl Proxy {
    /// In front of the server at `upstream` on this machine.
    pub async fn start(upstream: u16) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let plan: Arc<Mutex<Option<Plan>>> = Arc::default();
        let carried = Arc::clone(&plan);
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(carry(Arc::clone(&carried), client, upstream));
            }
        });
        Self { port, plan, task }
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Loses what the next `times` scripts bring.
    pub fn lose(&self, lose: Lose, times: usize) {
        *self.plan.lock().unwrap() = Some(Plan { lose, times });
    }

    /// Whether everything was lost that should be.
    pub fn has_lost(&self) -> bool {
        self.plan.lock().unwrap().as_ref().is_none_or(|plan| plan.times == 0)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn carry(plan: Arc<Mutex<Option<Plan>>>, client: TcpStream, upstream: u16) {
    let Ok(server) = TcpStream::connect(("127.0.0.1", upstream)).await else { return };
    for stream in [&client, &server] {
        stream.set_nodelay(true).unwrap();
    }
    let ((from_client, to_client), (from_server, to_server)) = (client.into_split(), server.into_split());
    let (mute, muted) = watch::channel(None);
    tokio::select! {
        _ = commands(&plan, from_client, to_server, mute) => {}
        _ = answers(from_server, to_client, muted) => {}
    }
    // Both sides see the end of the connection.
}

async fn commands(
    plan: &Mutex<Option<Plan>>,
    client: OwnedReadHalf,
    mut server: OwnedWriteHalf,
    mute: watch::Sender<Option<Lose>>,
) -> io::Result<()> {
    let mut client = BufReader::new(client);
    loop {
        let (name, command) = command(&mut client).await?;
        match if name.starts_with(b"EVAL") { planned(plan) } else { None } {
            Some(Lose::Command) => return Ok(()),
            Some(lose) => {
                mute.send_replace(Some(lose));
                server.write_all(&command).await?;
            }
            None => server.write_all(&command).await?,
        }
    }
}

fn planned(plan: &Mutex<Option<Plan>>) -> Option<Lose> {
    let mut plan = plan.lock().unwrap();
    let plan = plan.as_mut().filter(|plan| plan.times > 0)?;
    plan.times -= 1;
    Some(plan.lose)
}

/// A proxy to a server that may hang, and takes its time to accept a connection.
pub struct Sluggish {
    pub port: u16,
    hangs: Arc<AtomicBool>,
    end: watch::Sender<()>,
    task: JoinHandle<()>,
}

impl Sluggish {
    /// In front of the server at `upstream`: a connection is of use `connecting` after it was made.
    pub async fn start(upstream: u16, connecting: Duration) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (hangs, end) = (Arc::<AtomicBool>::default(), watch::Sender::new(()));
        let (hanging, ended) = (Arc::clone(&hangs), end.subscribe());
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(carry_slowly(client, upstream, connecting, Arc::clone(&hanging), ended.clone()));
            }
        });
        Self { port, hangs, end, task }
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// All connections end, and new ones are accepted and not answered.
    pub fn hang(&self) {
        self.hangs.store(true, Ordering::SeqCst);
        self.end.send_replace(());
    }

    /// New connections are answered again; those that were made meanwhile are not.
    pub fn recover(&self) {
        self.hangs.store(false, Ordering::SeqCst);
    }
}

impl Drop for Sluggish {
    fn drop(&mut self) {
        self.task.abort();
        self.end.send_replace(());
    }
}

async fn carry_slowly(
    mut client: TcpStream,
    upstream: u16,
    connecting: Duration,
    hangs: Arc<AtomicBool>,
    mut ended: watch::Receiver<()>,
) {
    ended.mark_unchanged();
    if hangs.load(Ordering::SeqCst) {
        // It reads and says nothing, until the client gives up.
        let mut ignored = [0; 1024];
        while client.read(&mut ignored).await.is_ok_and(|read| read > 0) {}
        return;
    }
    tokio::time::sleep(connecting).await;
    let Ok(mut server) = TcpStream::connect(("127.0.0.1", upstream)).await else { return };
    for stream in [&client, &server] {
        stream.set_nodelay(true).unwrap();
    }
    tokio::select! {
        _ = tokio::io::copy_bidirectional(&mut client, &mut server) => {}
        _ = ended.changed() => {}
    }
}

/// A command, which is an array of strings: its name, and all of it as it came.
async fn command(client: &mut BufReader<OwnedReadHalf>) -> io::Result<(Vec<u8>, Vec<u8>)> {
    let mut whole = Vec::new();
    let count = number(client, &mut whole).await?;
    let mut name = Vec::new();
    for at in 0..count {
        let length = number(client, &mut whole).await?;
        let from = whole.len();
        whole.resize(from + length + 2, 0);
        client.read_exact(&mut whole[from..]).await?;
        if at == 0 {
            name = whole[from..from + length].to_ascii_uppercase();
        }
    }
    Ok((name, whole))
}

/// The number in a line such as `$12`.
async fn number(client: &mut BufReader<OwnedReadHalf>, whole: &mut Vec<u8>) -> io::Result<usize> {
    let from = whole.len();
    if client.read_until(b'\n', whole).await? == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let line = String::from_utf8_lossy(&whole[from + 1..]);
    line.trim_end().parse().map_err(|_| io::ErrorKind::InvalidData.into())
}

async fn answers(
    mut server: OwnedReadHalf,
    mut client: OwnedWriteHalf,
    muted: watch::Receiver<Option<Lose>>,
) -> io::Result<()> {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let read = server.read(&mut buffer).await?;
        // An answer only comes once the script has run.
        let muted = *muted.borrow();
        match muted {
            _ if read == 0 => return Ok(()),
            None => client.write_all(&buffer[..read]).await?,
            Some(Lose::AnswerFrom(bytes)) => {
                client.write_all(&buffer[..read.min(bytes)]).await?;
                return Ok(());
            }
            Some(Lose::Command | Lose::EverythingSilently) => {}
        }
    }
}
