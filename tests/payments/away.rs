//! An unavailable store: nothing runs, and everything goes on when the store is back.

use idem_servers::{Postgres, Redis};

use crate::support::{Backend, Contract, Framework, Request, Server, Setup, eventually};

/// The servers of a store.
enum Away {
    Redis(Redis),
    Postgres(Postgres),
    /// Only Postgres is unavailable; the cache answers.
    HybridWithoutPostgres(Postgres, Redis),
}

impl Away {
    fn all() -> [Self; 3] {
        let (redis, postgres) = (|| Redis::start().unwrap(), || Postgres::start().unwrap());
        [Self::Redis(redis()), Self::Postgres(postgres()), Self::HybridWithoutPostgres(postgres(), redis())]
    }

    /// Starts a payments server on it, whose payments are in another database that stays available.
    fn serve(&self, framework: Framework, args: &[&str]) -> Server {
        let on = |stores: &[&str]| {
            let args = [args, stores, &["--ledger", "sqlite://ledger.db"]].concat();
            Server::start_on(Setup { framework, backend: Backend::Sqlite }, Contract::AtLeastOnce, &args)
        };
        match self {
            Self::Redis(redis) => {
                let args = [args, &["--framework", framework.name()]].concat();
                Server::start_on_redis(redis.url(), Contract::AtLeastOnce, &args)
            }
            Self::Postgres(postgres) => on(&["--store", &postgres.url()]),
            Self::HybridWithoutPostgres(postgres, redis) => on(&["--store", &postgres.url(), "--cache", &redis.url()]),
        }
    }

    /// Makes the store unavailable: Redis stands still with its connections, Postgres ends them.
    fn leave(&mut self) {
        match self {
            Self::Redis(redis) => redis.pause().unwrap(),
            Self::Postgres(postgres) | Self::HybridWithoutPostgres(postgres, _) => postgres.kill().unwrap(),
        }
    }

    fn come_back(&mut self) {
        match self {
            Self::Redis(redis) => redis.resume().unwrap(),
            Self::Postgres(postgres) | Self::HybridWithoutPostgres(postgres, _) => postgres.start_again().unwrap(),
        }
    }
}

#[test]
fn a_store_that_does_not_answer_is_503_and_nothing_runs() {
    for mut away in Away::all() {
        for framework in Framework::ALL {
            let server = away.serve(framework, &["--lease-ms", "4000"]);
            let (known, new) = (Request::pay("known"), Request::pay("new"));
            let tenant = framework.name();
            let (known, new) = (known.tenant(tenant), new.tenant(tenant));
            let effects = || server.send(&Request::get("/v1/ledger").tenant(tenant)).json()["effects"].as_u64();
            assert_eq!(server.send(&known).status, 201);
            away.leave();
            let refused = server.send(&new);
            assert_eq!((refused.status, refused.problem().as_deref()), (503, Some("store-unavailable")));
            assert!(refused.retry_after().is_some());
            let again = server.send(&known);
            // Redis may hold a copy; then the answer is a replay.
            assert!(again.is_replay() || again.problem().as_deref() == Some("store-unavailable"), "{again:?}");
            assert_eq!(effects(), Some(1));
            away.come_back();
            let answer = eventually("the store's return", || {
                let answer = server.send(&new);
                (![409, 503].contains(&answer.status)).then_some(answer)
            });
            assert_eq!((answer.status, answer.is_replay()), (201, false));
            let again =
                eventually("the known answer", || Some(server.send(&known)).filter(|answer| answer.status != 503));
            assert!(again.is_replay(), "{again:?}");
            assert_eq!(effects(), Some(2));
        }
    }
}

#[test]
fn a_server_that_fails_open_makes_payments_without_protection_and_says_so() {
    for mut away in Away::all() {
        for framework in Framework::ALL {
            let server = away.serve(framework, &["--dangerous-fail-open"]);
            // A paused Redis executes pending commands when it resumes, so each framework has its own key.
            let request = Request::pay(framework.name());
            away.leave();
            for payments in [1, 2] {
                let answer = server.send(&request);
                assert_eq!((answer.status, answer.is_replay(), server.effects()), (201, false, payments));
            }
            assert!(server.log().contains("an operation runs without protection"), "{framework:?}");
            away.come_back();
        }
    }
}
