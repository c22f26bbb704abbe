//! The store that the URL names.

use std::error::Error;

use async_trait::async_trait;
use clap::Args;
use idem_core::{IdempotencyStore, Inspect, Operate, Purge};

/// Which store.
#[derive(Debug, Clone, Args)]
pub(crate) struct StoreOptions {
    /// The store: postgres://…, sqlite:FILE or redis://….
    #[arg(long = "store", global = true, env = "IDEM_STORE", hide_env_values = true, value_name = "URL")]
    pub(crate) url: Option<String>,
    /// The schema of the records in Postgres.
    #[arg(long, global = true, value_name = "NAME", default_value = "idem")]
    pub(crate) schema: String,
    /// What the keys of the records in Redis begin with.
    #[arg(long, global = true, value_name = "PREFIX", default_value = "idem:")]
    pub(crate) key_prefix: String,
    /// How many replicas of Redis must have each change, as the application says it.
    #[arg(long, global = true, value_name = "NUMBER", default_value_t = 0)]
    pub(crate) min_replicas: u32,
    /// Takes a Redis that may evict records.
    #[arg(long, global = true)]
    pub(crate) dangerous_allow_eviction: bool,
    /// The server is behind a pooler such as PgBouncer in transaction mode.
    #[arg(long, global = true)]
    pub(crate) through_transaction_pooler: bool,
}

/// What the commands need of a store.
#[async_trait]
pub(crate) trait Store: IdempotencyStore + Inspect + Operate {
    /// Removes expired records; `None` if the server does that.
    fn purge(&self) -> Option<&dyn Purge>;

    /// What `check` says about this kind of store, after its self-test.
    async fn examine(&self) -> Result<Examination, Box<dyn Error>>;
}

/// What is known of a server.
#[derive(Debug)]
pub(crate) struct Examination {
    /// Its name and version.
    pub(crate) version: String,
    /// Lines about what is as it should be, and about weaknesses.
    pub(crate) lines: Vec<Line>,
}

/// How good something is, what it is, and a sentence about it.
pub(crate) type Line = (Level, &'static str, String);

/// How good a line of `check` is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Level {
    Ok,
    Weak,
    Unusable,
}

/// The kind of store, by the scheme of its URL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Postgres,
    Sqlite,
    Redis,
}

impl StoreOptions {
    fn kind(&self) -> Result<(Kind, &str), Box<dyn Error>> {
        let url = self.url.as_deref().ok_or("no store: give --store URL, or set IDEM_STORE")?;
        let scheme = url.split(':').next().unwrap_or_default();
        let kind = match scheme {
            "postgres" | "postgresql" => Kind::Postgres,
            "sqlite" => Kind::Sqlite,
            _ if scheme.starts_with("redis") || scheme == "rediss" => Kind::Redis,
            _ => return Err("the URL of the store must begin with postgres://, sqlite: or redis://".into()),
        };
        Ok((kind, url))
    }

    /// Opens the store. Changes no schema, and creates no file.
    pub(crate) async fn open(&self) -> Result<Box<dyn Store>, Box<dyn Error>> {
        self.open_with(false).await
    }

    /// Brings the schema up to date.
    pub(crate) async fn migrate(&self) -> Result<(), Box<dyn Error>> {
        self.open_with(true).await.map(drop)
    }

    async fn open_with(&self, migrating: bool) -> Result<Box<dyn Store>, Box<dyn Error>> {
        let (kind, url) = self.kind()?;
        match kind {
            #[cfg(feature = "postgres")]
            Kind::Postgres => postgres::open(url, self, migrating).await,
            #[cfg(feature = "sqlite")]
            Kind::Sqlite => sqlite::open(url, migrating).await,
            #[cfg(feature = "redis")]
            Kind::Redis => redis::open(url, self).await,
            #[cfg(not(all(feature = "postgres", feature = "sqlite", feature = "redis")))]
            _ => {
                Err(format!("this build of idem has no support for {url:?}; build it with the store's feature").into())
            }
        }
    }
}

#[cfg(feature = "postgres")]
mod postgres {
    use std::error::Error;

    use async_trait::async_trait;
    use idem_core::{Durability, Purge};
    use idem_postgres::{PostgresConfig, PostgresStore};

    use super::{Examination, Level, Store, StoreOptions};

    pub(super) async fn open(
        url: &str,
        options: &StoreOptions,
        migrating: bool,
    ) -> Result<Box<dyn Store>, Box<dyn Error>> {
        let config = PostgresConfig::new(url).schema(&options.schema);
        let config = if migrating { config } else { config.without_migrating() };
        let config = if options.through_transaction_pooler { config.through_transaction_pooler() } else { config };
        Ok(Box::new(PostgresStore::open(config).await?))
    }

    #[async_trait]
    impl Store for PostgresStore {
        fn purge(&self) -> Option<&dyn Purge> {
            Some(self)
        }

        async fn examine(&self) -> Result<Examination, Box<dyn Error>> {
            let report = self.self_test().await?;
            let health = self.health().await?;
            let durability = &report.durability;
            let level = if durability.level == Durability::Power { Level::Ok } else { Level::Weak };
            let mut lines = vec![(level, "durability", durability.to_string())];
            lines.extend(report.open_schemas.iter().map(|open| (Level::Weak, "privileges", open.to_string())));
            Ok(Examination { version: format!("PostgreSQL {}", health.version), lines })
        }
    }
}

#[cfg(feature = "sqlite")]
mod sqlite {
    use std::error::Error;

    use async_trait::async_trait;
    use idem_core::{Durability, Purge};
    use idem_sqlite::{SqliteConfig, SqliteStore};

    use super::{Examination, Level, Store};

    pub(super) async fn open(url: &str, migrating: bool) -> Result<Box<dyn Store>, Box<dyn Error>> {
        let config = SqliteConfig::new(url);
        let config = if migrating { config } else { config.without_migrating() };
        Ok(Box::new(SqliteStore::open(config).await?))
    }

    #[async_trait]
    impl Store for SqliteStore {
        fn purge(&self) -> Option<&dyn Purge> {
            Some(self)
        }

        async fn examine(&self) -> Result<Examination, Box<dyn Error>> {
            self.self_test().await?;
            let health = self.health().await?;
            let line = match health.durability {
                Durability::Power => (Level::Ok, "durability", "commits survive a loss of power".to_owned()),
                _ => (Level::Weak, "durability", "a loss of power may lose the last commits".to_owned()),
            };
            Ok(Examination { version: format!("SQLite {}", health.version), lines: vec![line] })
        }
    }
}

#[cfg(feature = "redis")]
mod redis {
    use std::error::Error;

    use async_trait::async_trait;
    use idem_core::{Durability, Purge};
    use idem_redis::{RedisConfig, RedisStore};

    use super::{Examination, Level, Store, StoreOptions};

    pub(super) async fn open(url: &str, options: &StoreOptions) -> Result<Box<dyn Store>, Box<dyn Error>> {
        let config = RedisConfig::new(url).key_prefix(&options.key_prefix).min_replicas(options.min_replicas);
        let config = if options.dangerous_allow_eviction { config.dangerous_allow_eviction() } else { config };
        Ok(Box::new(RedisStore::open(config).await?))
    }

    #[async_trait]
    impl Store for RedisStore {
        fn purge(&self) -> Option<&dyn Purge> {
            None
        }

        async fn examine(&self) -> Result<Examination, Box<dyn Error>> {
            let durability = self.self_test().await?;
            let health = self.health().await?;
            let level = if durability.level() == Durability::Process { Level::Weak } else { Level::Ok };
            let lines = vec![(level, "durability", durability.to_string())];
            Ok(Examination { version: format!("Redis {}", health.version), lines })
        }
    }
}
