//! Loses planned exchanges with Redis, or their answers.

use std::io;
use std::sync::Mutex;

use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::sync::watch;

use crate::{Ended, Harm};

/// The fate of a connection at the planned exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lose {
    /// It ends before the command reaches the server.
    Command,
    /// It ends after the server executed the command, and after this many bytes of the answer.
    AnswerFrom(usize),
    /// The server executes the command; the client sees neither an answer nor an end.
    EverythingSilently,
}

#[derive(Debug)]
struct Plan {
    lose: Lose,
    times: usize,
}

/// Loses the exchanges that [`Losses::lose`] plans. An exchange is one script, or one `SET`.
#[derive(Debug, Default)]
pub struct Losses(Mutex<Option<Plan>>);

impl Losses {
    /// Loses the next `times` exchanges.
    pub fn lose(&self, lose: Lose, times: usize) {
        *self.0.lock().unwrap() = Some(Plan { lose, times });
    }

    /// Whether all planned losses happened.
    #[must_use]
    pub fn has_lost(&self) -> bool {
        self.0.lock().unwrap().as_ref().is_none_or(|plan| plan.times == 0)
    }

    fn planned(&self) -> Option<Lose> {
        let mut plan = self.0.lock().unwrap();
        let plan = plan.as_mut().filter(|plan| plan.times > 0)?;
        plan.times -= 1;
        Some(plan.lose)
    }
}

impl Harm for Losses {
    async fn carry(&self, client: &mut TcpStream, server: &mut TcpStream) -> io::Result<Ended> {
        let ((from_client, to_client), (from_server, to_server)) = (client.split(), server.split());
        let (mute, muted) = watch::channel(None);
        tokio::select! {
            ended = commands(self, from_client, to_server, mute) => ended?,
            ended = answers(from_server, to_client, muted) => ended?,
        }
        Ok(Ended::Closed)
    }
}

async fn commands(
    losses: &Losses,
    client: ReadHalf<'_>,
    mut server: WriteHalf<'_>,
    mute: watch::Sender<Option<Lose>>,
) -> io::Result<()> {
    let mut client = BufReader::new(client);
    loop {
        let (name, command) = command(&mut client).await?;
        match if name.starts_with(b"EVAL") || name == b"SET" { losses.planned() } else { None } {
            Some(Lose::Command) => return Ok(()),
            Some(lose) => {
                mute.send_replace(Some(lose));
                server.write_all(&command).await?;
            }
            None => server.write_all(&command).await?,
        }
    }
}

/// Reads a command, which is an array of strings. Returns its name and all its bytes.
async fn command(client: &mut BufReader<ReadHalf<'_>>) -> io::Result<(Vec<u8>, Vec<u8>)> {
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

/// Reads a line such as `$12` and returns its number.
async fn number(client: &mut BufReader<ReadHalf<'_>>, whole: &mut Vec<u8>) -> io::Result<usize> {
    let from = whole.len();
    if client.read_until(b'\n', whole).await? == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let line = String::from_utf8_lossy(&whole[from + 1..]);
    line.trim_end().parse().map_err(|_| io::ErrorKind::InvalidData.into())
}

async fn answers(
    mut server: ReadHalf<'_>,
    mut client: WriteHalf<'_>,
    muted: watch::Receiver<Option<Lose>>,
) -> io::Result<()> {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let read = server.read(&mut buffer).await?;
        // An answer comes only after the command was executed.
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
