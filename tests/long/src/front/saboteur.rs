//! Makes Redis fail in every way, and restarts Postgres.

use std::collections::BTreeMap;
use std::time::Duration;

use idem_servers::{Redis, redis_command};
use tokio::time::{Instant, sleep};

use crate::Error;
use crate::database::Database;
use crate::random::Random;

/// What was sabotaged.
#[derive(Debug, Default)]
pub(super) struct Sabotage {
    pub(super) faults: BTreeMap<&'static str, u64>,
    /// When Postgres was away.
    pub(super) away: Vec<(Duration, Duration)>,
    /// Entries that were overwritten.
    pub(super) garbled: u64,
}

#[derive(Debug, Clone, Copy)]
enum Fault {
    /// `kill -9`; it comes back after a while, empty.
    Kill,
    /// It stands still for a while, and then executes what it was sent meanwhile.
    Pause,
    Flush,
    /// Every entry, and more keys, hold something else.
    Garbage,
    /// Stopped and started, empty.
    Restart,
    /// All connections are closed.
    Disconnect,
}

const FAULTS: [Fault; 6] = [Fault::Kill, Fault::Pause, Fault::Flush, Fault::Garbage, Fault::Restart, Fault::Disconnect];

/// What a key may hold: nothing, no entry, an entry of another version, or another of our types.
const GARBAGE: &str = "
local cursor, count = '0', 0
repeat
  local page = redis.call('SCAN', cursor, 'COUNT', 1000)
  cursor = page[1]
  for _, key in ipairs(page[2]) do
    count = count + 1
    local kind = count % 4
    local there = redis.pcall('GET', key)
    if kind == 0 then
      redis.call('SET', key, '')
    elseif kind == 1 then
      redis.call('SET', key, '18446744073709551615:idem' .. string.char(2) .. 'another version')
    elseif kind == 2 and type(there) == 'string' then
      redis.call('SET', key, string.sub(there, 1, #there - 1) .. string.char(count % 256))
    else
      redis.call('DEL', key)
      redis.call('RPUSH', key, 'a list')
    end
  end
until cursor == '0'
return count";

pub(super) struct Saboteur {
    redis: Redis,
    /// Times count from here.
    started: Instant,
    lasts: Duration,
    restarts: u64,
    random: Random,
    done: Sabotage,
}

impl Saboteur {
    pub(super) fn new(redis: Redis, started: Instant, lasts: Duration, restarts: u64) -> Self {
        Self { redis, started, lasts, restarts, random: Random::new(), done: Sabotage::default() }
    }

    /// Sabotages until the time is over, and leaves both servers healthy.
    pub(super) async fn work(mut self, mut database: Database) -> Result<(Sabotage, Database), Error> {
        let mut restarted = 0;
        while self.started.elapsed() < self.lasts {
            let fault = FAULTS[self.random.below(FAULTS.len() as u64) as usize];
            println!("  {:6.2} s: {fault:?}", self.started.elapsed().as_secs_f64());
            self.cause(fault).await?;
            let name = match fault {
                Fault::Kill => "kill",
                Fault::Pause => "pause",
                Fault::Flush => "flush",
                Fault::Garbage => "garbage",
                Fault::Restart => "restart",
                Fault::Disconnect => "disconnect",
            };
            *self.done.faults.entry(name).or_default() += 1;
            sleep(Duration::from_millis(200 + self.random.below(1_000))).await;
            // Restarts are spread evenly; the last one is well before the end.
            let due = self.lasts.mul_f64((restarted + 1) as f64 / (self.restarts + 1) as f64);
            if restarted < self.restarts && self.started.elapsed() >= due {
                database = self.restart(database, restarted % 2 == 0).await?;
                restarted += 1;
            }
        }
        Ok((self.done, database))
    }

    async fn cause(&mut self, fault: Fault) -> Result<(), Error> {
        let while_it_lasts = Duration::from_millis(100 + self.random.below(900));
        match fault {
            Fault::Kill => {
                self.redis.kill()?;
                sleep(while_it_lasts).await;
                self.redis.start_again()?;
            }
            Fault::Pause => {
                self.redis.pause()?;
                sleep(while_it_lasts).await;
                self.redis.resume()?;
            }
            Fault::Flush => {
                redis_command(self.redis.port(), &["FLUSHALL"])?;
            }
            Fault::Garbage => {
                let garbled = redis_command(self.redis.port(), &["EVAL", GARBAGE, "0"])?;
                self.done.garbled += garbled.integer().unwrap_or_default().unsigned_abs();
            }
            Fault::Restart => self.redis.restart()?,
            Fault::Disconnect => {
                redis_command(self.redis.port(), &["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"])?;
            }
        }
        Ok(())
    }

    async fn restart(&mut self, database: Database, by_force: bool) -> Result<Database, Error> {
        let from = self.started.elapsed();
        let database = database.restart(by_force).await?;
        let until = self.started.elapsed();
        println!("  {:6.2} s: Postgres was away for {:.2} s", until.as_secs_f64(), (until - from).as_secs_f64());
        self.done.away.push((from, until));
        Ok(database)
    }
}
