//! Stores with separate keys, on the servers that the tests are given.

use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use idem_core::OwnerToken;
use idem_redis::{RedisConfig, RedisStore, TimeOffset};
use idem_servers::{RedisAddress, redis_command, redis_expire_sooner};
use idem_testkit::{Remaining, Subject, TimeControl};

/// As long as a test may take on a loaded machine.
const PRECISION: Duration = Duration::from_secs(10);

/// How many keys have a prefix.
const COUNT: &str = "
local cursor, count = '0', 0
repeat
  local page = redis.call('SCAN', cursor, 'MATCH', ARGV[1], 'COUNT', 1000)
  cursor = page[1]
  count = count + #page[2]
until cursor == '0'
return count";

/// Keys that no other test has.
pub fn fresh_prefix() -> String {
    let token: String = OwnerToken::random().as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    format!("test-{token}:")
}

/// The time of one store, and the keys that it made.
#[derive(Debug)]
pub struct Time {
    pub offset: TimeOffset,
    /// The primaries.
    pub servers: Vec<RedisAddress>,
    pub prefix: String,
}

impl TimeControl for Time {
    fn advance(&self, by: Duration) {
        if !by.is_zero() {
            self.offset.advance(by);
            self.expire_sooner(by).unwrap();
        }
    }
}

impl Time {
    /// Moves the expiry of all keys with the store's time, so that the times of their records stay the same.
    fn expire_sooner(&self, by: Duration) -> Result<(), idem_servers::Error> {
        self.servers.iter().try_for_each(|server| redis_expire_sooner(*server, &self.prefix, by))
    }
}

impl Drop for Time {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // Leftover keys do not affect the result; the server ends with its tests.
            let _ = self.expire_sooner(Duration::MAX);
        }
    }
}

#[async_trait]
impl Remaining for Time {
    async fn remaining(&self) -> u64 {
        let pattern = format!("{}*", self.prefix);
        let ask = |server: &RedisAddress| redis_command(*server, &["EVAL", COUNT, "0", &pattern]).unwrap();
        self.servers.iter().map(|server| ask(server).integer().unwrap()).sum::<i64>().unsigned_abs()
    }
}

/// Those of the servers that are primaries.
pub fn primaries<A: Into<RedisAddress> + Copy>(servers: &[A]) -> Vec<A> {
    let is_primary = |server: &&A| redis_command(**server, &["ROLE"]).unwrap().items()[0].text() == Some("master");
    servers.iter().filter(is_primary).copied().collect()
}

/// The addresses in a URL such as `redis+sentinel://127.0.0.1:7000,172.18.0.3:26379/service`.
pub fn addresses(url: &str) -> Vec<SocketAddr> {
    let (_, rest) = url.split_once("://").unwrap();
    let authority = rest.split('/').next().unwrap();
    let hosts = authority.rsplit('@').next().unwrap();
    hosts.split(',').map(|host| host.to_socket_addrs().unwrap().find(SocketAddr::is_ipv4).unwrap()).collect()
}

/// The ports in a URL such as `redis+cluster://127.0.0.1:7000,127.0.0.1:7001`.
pub fn ports(url: &str) -> Vec<u16> {
    let numbers = url.split(|letter: char| !letter.is_ascii_digit());
    numbers.filter_map(|digits| digits.parse().ok()).filter(|port| *port > 1_000).collect()
}

/// The store at `url`, as the conformance suite takes it; `servers` are the primaries.
pub async fn subject<A: Into<RedisAddress>>(
    url: &str,
    servers: Vec<A>,
    configure: impl FnOnce(RedisConfig) -> RedisConfig,
) -> Subject {
    let (offset, prefix) = (TimeOffset::default(), fresh_prefix());
    let config = RedisConfig::new(url).key_prefix(&prefix).timeout(PRECISION).time_offset(offset.clone());
    let store = Arc::new(RedisStore::open(configure(config)).await.unwrap());
    let time = Arc::new(Time { offset, servers: servers.into_iter().map(Into::into).collect(), prefix });
    let subject = Subject::purging_itself(store.clone(), time.clone(), time).operated_by(store.clone());
    subject.inspected_by(store).without_origins().with_precision(PRECISION)
}
