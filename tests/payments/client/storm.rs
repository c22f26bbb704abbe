//! A network that harms three of ten exchanges, and a server that answers 503 in bursts.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use idem_proxy::{Ended, Harm};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// What happens to one exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Clear,
    /// The connection is reset before the request arrives.
    Reset,
    /// Both directions are late.
    Delay,
    /// The client gets some bytes of the answer, and then a reset.
    Cut,
    /// The request arrives, and its answer does not.
    Lost,
    /// The answer is a 503, and the request does not arrive.
    Unavailable,
}

/// Every 200 exchanges, this many in a row are answered 503.
const BURST: u64 = 20;

const UNAVAILABLE: &[u8] =
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 0\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";

/// Harms exchanges by a seed: the fate of each depends on its number.
#[derive(Debug)]
pub(super) struct Storm {
    seed: u64,
    exchanges: AtomicU64,
    harmed: AtomicU64,
}

impl Storm {
    pub(super) fn new(seed: u64) -> Self {
        Self { seed, exchanges: AtomicU64::new(0), harmed: AtomicU64::new(0) }
    }

    /// The number of exchanges, and of those that came to harm.
    pub(super) fn counts(&self) -> (u64, u64) {
        (self.exchanges.load(Ordering::SeqCst), self.harmed.load(Ordering::SeqCst))
    }

    fn next(&self) -> Fate {
        let number = self.exchanges.fetch_add(1, Ordering::SeqCst);
        let fate = if number % 200 < BURST {
            Fate::Unavailable
        } else {
            match mixed(self.seed ^ number) % 40 {
                0..3 => Fate::Reset,
                3..6 => Fate::Delay,
                6..9 => Fate::Cut,
                9..12 => Fate::Lost,
                _ => Fate::Clear,
            }
        };
        self.harmed.fetch_add(u64::from(fate != Fate::Clear), Ordering::SeqCst);
        fate
    }
}

/// The last step of splitmix64.
fn mixed(number: u64) -> u64 {
    let number = number.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let number = (number ^ (number >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    number ^ (number >> 31)
}

impl Harm for Storm {
    async fn carry(&self, client: &mut TcpStream, server: &mut TcpStream) -> io::Result<Ended> {
        let (mut request, mut answer) = (vec![0; 64 * 1024], vec![0; 64 * 1024]);
        let mut fate = Fate::Clear;
        loop {
            tokio::select! {
                read = client.read(&mut request) => {
                    let read = read?;
                    if read == 0 {
                        return Ok(Ended::Closed);
                    }
                    fate = self.next();
                    match fate {
                        Fate::Reset => return Ok(Ended::ClientReset),
                        Fate::Unavailable => {
                            client.write_all(UNAVAILABLE).await?;
                            return Ok(Ended::Closed);
                        }
                        Fate::Delay => tokio::time::sleep(Duration::from_millis(10)).await,
                        Fate::Clear | Fate::Cut | Fate::Lost => {}
                    }
                    server.write_all(&request[..read]).await?;
                }
                read = server.read(&mut answer) => {
                    let read = read?;
                    if read == 0 {
                        return Ok(Ended::Closed);
                    }
                    match fate {
                        Fate::Lost => return Ok(Ended::ClientReset),
                        Fate::Cut => {
                            // Anywhere, also in the middle of the body.
                            let some = usize::try_from(mixed(self.exchanges.load(Ordering::SeqCst))).unwrap_or(0) % read;
                            client.write_all(&answer[..some]).await?;
                            return Ok(Ended::ClientReset);
                        }
                        Fate::Delay => tokio::time::sleep(Duration::from_millis(10)).await,
                        Fate::Clear | Fate::Reset | Fate::Unavailable => {}
                    }
                    client.write_all(&answer[..read]).await?;
                }
            }
        }
    }
}
