//! Starts a server, prints its URL, and waits to be killed. Tests of a killed parent kill this program.

use std::io::Write;

use idem_servers::{Postgres, Redis, RedisCluster, RedisSentinel};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    match std::env::args().nth(1).as_deref() {
        Some("postgres") => {
            let postgres = Postgres::start_with(&["fsync=off"])?;
            hold(&postgres.url(), postgres)
        }
        Some("redis") => {
            let redis = Redis::start()?;
            hold(&redis.url(), redis)
        }
        Some("redis-sentinel") => {
            let group = RedisSentinel::start()?;
            hold(&group.url(), group)
        }
        Some("redis-cluster") => {
            let cluster = RedisCluster::start()?;
            hold(&cluster.url(), cluster)
        }
        _ => Err("which server? postgres, redis, redis-sentinel or redis-cluster".into()),
    }
}

fn hold<T>(url: &str, _server: T) -> Result<(), Box<dyn std::error::Error>> {
    println!("{url}");
    std::io::stdout().flush()?;
    loop {
        std::thread::park();
    }
}
