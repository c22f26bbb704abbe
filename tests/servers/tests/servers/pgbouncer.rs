//! Tests of PgBouncer in front of a server.

use idem_servers::{PgBouncer, Postgres};

use crate::client::{Client, ask, port};

#[test]
fn pgbouncer_passes_queries_on_to_the_server() {
    let postgres = Postgres::start().unwrap();
    let pgbouncer = PgBouncer::start(&postgres.url(), 2).unwrap();
    let port = port(pgbouncer.url());
    assert_ne!(port, postgres.port());
    assert!(pgbouncer.version().starts_with("PgBouncer 1."), "{}", pgbouncer.version());
    let answer = ask(port, "SELECT inet_server_port(), current_user").unwrap();
    assert_eq!(answer, format!("{}|postgres", ask(postgres.port(), "SELECT inet_server_port()").unwrap()));
}

#[test]
fn clients_share_as_many_connections_as_the_pool_has() {
    let postgres = Postgres::start().unwrap();
    let pgbouncer = PgBouncer::start(&postgres.url(), 2).unwrap();
    let port = port(pgbouncer.url());
    let mut clients: Vec<Client> = (0..6).map(|_| Client::connect(port).unwrap()).collect();
    for client in &mut clients[..2] {
        client.ask("BEGIN").unwrap();
    }
    assert!(clients[2].ask("SELECT 1").is_err(), "both connections are in a transaction");
    clients[0].ask("COMMIT").unwrap();
    assert_eq!(clients[3].ask("SELECT 1").unwrap(), "1");
}

#[test]
fn pgbouncer_that_crashed_starts_again_on_its_port() {
    let postgres = Postgres::start().unwrap();
    let mut pgbouncer = PgBouncer::start(&postgres.url(), 2).unwrap();
    let port = pgbouncer.port();
    for _ in 0..2 {
        assert_eq!(ask(port, "SELECT 1").unwrap(), "1");
        pgbouncer.kill().unwrap();
        assert!(Client::connect(port).is_err(), "it is gone");
        pgbouncer.start_again().unwrap();
    }
    assert_eq!(ask(port, "SELECT 1").unwrap(), "1");
    assert!(pgbouncer.start_again().is_err(), "it runs");
}

#[test]
fn pgbouncer_is_gone_when_it_is_dropped() {
    let pgbouncer = PgBouncer::start("postgres://postgres@127.0.0.1:1/postgres", 2).unwrap();
    let port = port(pgbouncer.url());
    assert!(Client::connect(port).is_err(), "there is no server behind it");
    std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
    drop(pgbouncer);
    assert!(std::net::TcpStream::connect(("127.0.0.1", port)).is_err());
}
