//! A proxy that delays what passes to and from a server.
//!
//! The kernel's `netem` would do it, if it is built in. Timers of tokio count whole milliseconds, so threads sleep here.

use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// A port on this machine that leads to `port`; each byte takes half of `round_trip` each way. It ends with the process.
pub(crate) fn link(port: u16, round_trip: Duration) -> io::Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let link = listener.local_addr()?.port();
    thread::spawn(move || {
        for client in listener.incoming().filter_map(Result::ok) {
            // If the server refuses, the client's connection ends.
            let _ = join(client, port, round_trip / 2);
        }
    });
    Ok(link)
}

fn join(client: TcpStream, port: u16, delay: Duration) -> io::Result<()> {
    let server = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    for stream in [&client, &server] {
        stream.set_nodelay(true)?;
    }
    carry(client.try_clone()?, server.try_clone()?, delay);
    carry(server, client, delay);
    Ok(())
}

/// Forwards what is read, each part `delay` later. One thread reads and one writes, so that parts keep their order.
fn carry(mut from: TcpStream, mut to: TcpStream, delay: Duration) {
    let (parts, arriving) = mpsc::channel::<(Instant, Vec<u8>)>();
    thread::spawn(move || {
        let mut buffer = [0; 64 * 1024];
        while let Ok(length @ 1..) = from.read(&mut buffer) {
            if parts.send((Instant::now() + delay, buffer[..length].to_vec())).is_err() {
                break;
            }
        }
    });
    thread::spawn(move || {
        for (due, part) in arriving {
            thread::sleep(due.saturating_duration_since(Instant::now()));
            if to.write_all(&part).is_err() {
                break;
            }
        }
        // The other end has closed it, or is gone already.
        let _ = to.shutdown(Shutdown::Both);
    });
}
