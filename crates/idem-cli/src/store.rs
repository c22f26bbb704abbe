//! The store that the URL names.

use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use clap::Args;
use idem_core::{DurableStore, IdempotencyStore, Inspect, MissingPrivilege, Operate, Purge, StoreError};
use idem_encryption::EncryptedStore;
use idem_hybrid::HybridStore;

use crate::{keys, with_causes};

#[cfg(all(feature = "redis", any(feature = "postgres", feature = "mysql", feature = "sqlite")))]
mod front;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod parking;

/// Which store.
#[derive(Debug, Clone, Args)]
pub(crate) struct StoreOptions {
    /// The store: postgres://…, mysql://…, sqlite:FILE or redis://….
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
    /// The Redis in front of the store, if the application uses idem-hybrid. `erase` needs it for the copies there.
    #[arg(long, global = true, env = "IDEM_FRONT", hide_env_values = true, value_name = "URL")]
    pub(crate) front: Option<String>,
    /// The file with the keys of an encrypted store; only its owner may read it. The README has its format.
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) keys: Option<PathBuf>,
}

/// What the commands need of a store.
#[async_trait]
pub(crate) trait Store: IdempotencyStore + Inspect + Operate {
    /// Removes expired records; `None` if the server does that.
    fn purge(&self) -> Option<&dyn Purge>;

    /// What `check` says about this kind of store, after its self-test.
    async fn examine(&self) -> Result<Examination, Box<dyn Error>>;

    /// The privileges that this login lacks; `None` if this kind of store cannot tell.
    async fn missing_privileges(&self) -> Result<Option<Vec<MissingPrivilege>>, StoreError> {
        Ok(None)
    }

    /// Gives the records a new identity. With `keep`, only remembers the history of the server.
    async fn renew_identity(&self, keep: bool) -> Result<(), Box<dyn Error>>;

    /// The same store, if it opens and seals answers.
    fn encrypted(&self) -> Option<&EncryptedStore<dyn Store>> {
        None
    }

    /// Where copies of its answers may be.
    fn copies(&self) -> Copies {
        Copies::None
    }
}

/// Where copies of the answers of a store may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Copies {
    /// There are none.
    None,
    /// The application may have put a Redis in front of the store, which the store does not know.
    #[cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite"))]
    NotKnown,
    /// In the Redis in front of it, where this process has erased so many.
    InFront { erased: u64 },
}

#[async_trait]
impl Store for EncryptedStore<dyn Store> {
    fn purge(&self) -> Option<&dyn Purge> {
        self.inner().purge()
    }

    async fn examine(&self) -> Result<Examination, Box<dyn Error>> {
        self.inner().examine().await
    }

    async fn missing_privileges(&self) -> Result<Option<Vec<MissingPrivilege>>, StoreError> {
        self.inner().missing_privileges().await
    }

    async fn renew_identity(&self, keep: bool) -> Result<(), Box<dyn Error>> {
        self.inner().renew_identity(keep).await
    }

    fn encrypted(&self) -> Option<&EncryptedStore<dyn Store>> {
        Some(self)
    }

    fn copies(&self) -> Copies {
        self.inner().copies()
    }
}

#[async_trait]
impl<D: Store + DurableStore> Store for HybridStore<D> {
    fn purge(&self) -> Option<&dyn Purge> {
        self.durable().purge()
    }

    async fn examine(&self) -> Result<Examination, Box<dyn Error>> {
        let mut found = self.durable().examine().await?;
        found.lines.push(match self.health().await.fast {
            Ok(()) => (Level::Ok, "front", "Redis in front of the store answers".to_owned()),
            Err(error) => (Level::Weak, "front", with_causes(&error)),
        });
        Ok(found)
    }

    async fn missing_privileges(&self) -> Result<Option<Vec<MissingPrivilege>>, StoreError> {
        Store::missing_privileges(&**self.durable()).await
    }

    async fn renew_identity(&self, keep: bool) -> Result<(), Box<dyn Error>> {
        self.durable().renew_identity(keep).await
    }

    fn copies(&self) -> Copies {
        Copies::InFront { erased: self.metrics().erased_copies }
    }
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
    /// It could not be found out.
    #[cfg_attr(not(feature = "postgres"), expect(dead_code, reason = "only Postgres has a history"))]
    Unknown,
    Weak,
    Unusable,
}

/// The kind of store, by the scheme of its URL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Postgres,
    MySql,
    Sqlite,
    Redis,
}

impl StoreOptions {
    fn kind(&self) -> Result<(Kind, &str), Box<dyn Error>> {
        let url = self.url.as_deref().ok_or("no store: give --store URL, or set IDEM_STORE")?;
        let scheme = url.split(':').next().unwrap_or_default();
        let kind = match scheme {
            "postgres" | "postgresql" => Kind::Postgres,
            "mysql" | "mariadb" => Kind::MySql,
            "sqlite" => Kind::Sqlite,
            _ if scheme.starts_with("redis") || scheme == "rediss" => Kind::Redis,
            _ => return Err("the URL of the store must begin with postgres://, mysql://, sqlite: or redis://".into()),
        };
        Ok((kind, url))
    }

    /// Opens the store. Changes no schema, and creates no file.
    pub(crate) async fn open(&self) -> Result<Box<dyn Store>, Box<dyn Error>> {
        self.open_with(false).await
    }

    /// The durable store, behind the Redis that is in front of it.
    #[cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite"))]
    fn with_front<D: Store + DurableStore>(&self, durable: D) -> Result<Box<dyn Store>, Box<dyn Error>> {
        match &self.front {
            None => Ok(Box::new(durable)),
            #[cfg(feature = "redis")]
            Some(url) => Ok(Box::new(front::in_front_of(durable, url, &self.key_prefix)?)),
            #[cfg(not(feature = "redis"))]
            Some(_) => Err("--front needs a build of idem with the feature redis".into()),
        }
    }

    /// Where the application parks messages. Makes no table.
    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    pub(crate) async fn parking(&self) -> Result<Box<dyn idem_inbox::Parking>, Box<dyn Error>> {
        let (kind, url) = self.kind()?;
        match kind {
            #[cfg(feature = "postgres")]
            Kind::Postgres => parking::postgres(url, &self.schema).await,
            #[cfg(feature = "sqlite")]
            Kind::Sqlite => parking::sqlite(url).await,
            _ => Err("messages are parked in Postgres or SQLite: give the database of the inbox as --store".into()),
        }
    }

    /// Brings the schema up to date.
    pub(crate) async fn migrate(&self) -> Result<(), Box<dyn Error>> {
        self.open_with(true).await.map(drop)
    }

    async fn open_with(&self, migrating: bool) -> Result<Box<dyn Store>, Box<dyn Error>> {
        // Before anything is opened, so that a wrong file is the first to be said.
        let config = self.keys.as_deref().map(keys::read).transpose()?;
        let store = self.open_plain(migrating).await?;
        Ok(match config {
            Some(config) => Box::new(EncryptedStore::new(Arc::from(store), config)),
            None => store,
        })
    }

    async fn open_plain(&self, migrating: bool) -> Result<Box<dyn Store>, Box<dyn Error>> {
        let (kind, url) = self.kind()?;
        match kind {
            #[cfg(feature = "postgres")]
            Kind::Postgres => postgres::open(url, self, migrating).await,
            #[cfg(feature = "mysql")]
            Kind::MySql => mysql::open(url, self, migrating).await,
            #[cfg(feature = "sqlite")]
            Kind::Sqlite => sqlite::open(url, self, migrating).await,
            #[cfg(feature = "redis")]
            Kind::Redis if self.front.is_some() => {
                Err("--front (or IDEM_FRONT) is for a store in Postgres, MariaDB or SQLite: give that one as --store"
                    .into())
            }
            #[cfg(feature = "redis")]
            Kind::Redis => redis::open(url, self).await,
            #[cfg(not(all(feature = "postgres", feature = "mysql", feature = "sqlite", feature = "redis")))]
            kind => {
                let _ = (url, migrating);
                Err(format!("this build of idem has no support for {kind:?}; build it with the store's feature").into())
            }
        }
    }
}

#[cfg(feature = "postgres")]
mod postgres {
    use std::error::Error;

    use async_trait::async_trait;
    use idem_core::{Durability, MissingPrivilege, Purge, StoreError};
    use idem_postgres::{PostgresConfig, PostgresStore};

    use super::{Copies, Examination, Level, Line, Store, StoreOptions};
    use crate::with_causes;

    pub(super) async fn open(
        url: &str,
        options: &StoreOptions,
        migrating: bool,
    ) -> Result<Box<dyn Store>, Box<dyn Error>> {
        let config = PostgresConfig::new(named(url)).schema(&options.schema);
        let config = if migrating { config } else { config.without_migrating() };
        let config = if options.through_transaction_pooler { config.through_transaction_pooler() } else { config };
        options.with_front(PostgresStore::open(config).await?)
    }

    /// The URL with an `application_name` of this process alone: operators see whose sessions these are, and `new-identity` knows
    /// its own. The last name counts, so one in the URL, which may be the application's, does not.
    fn named(url: &str) -> String {
        let separator = if url.contains('?') { '&' } else { '?' };
        format!("{url}{separator}application_name=idem-cli-{}", std::process::id())
    }

    /// What the history of the server says.
    async fn history(store: &PostgresStore) -> Line {
        const ADVICE: &str = "if records may be lost, stop the application and run `idem new-identity --reason WHY`; if none is, run \
            `idem new-identity --keep --reason WHY`";
        match store.history().await {
            Ok(history) if history.has_changed() => {
                let before = history.remembered.unwrap_or_default();
                let text =
                    format!("the server was restored or promoted: {before} is {} now; {ADVICE}", history.current);
                (Level::Weak, "history", text)
            }
            Ok(history) if history.remembered.is_some() => {
                (Level::Ok, "history", format!("the server is the one of the last check: {}", history.current))
            }
            Ok(history) => match store.remember_history().await {
                Ok(()) => (Level::Ok, "history", format!("remembered: {}", history.current)),
                Err(error) => {
                    let text =
                        format!("a restore will not be noticed, as it is not remembered: {}", with_causes(&error));
                    (Level::Unknown, "history", text)
                }
            },
            Err(error) => {
                let text = format!("it is not known whether the server was restored: {}", with_causes(&error));
                (Level::Unknown, "history", text)
            }
        }
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
            let mut lines = vec![(level, "durability", format!("{durability} (by the settings of this login)"))];
            lines.push(history(self).await);
            lines.extend(report.open_schemas.iter().map(|open| (Level::Weak, "schemas", open.to_string())));
            Ok(Examination { version: format!("PostgreSQL {}", health.version), lines })
        }

        async fn missing_privileges(&self) -> Result<Option<Vec<MissingPrivilege>>, StoreError> {
            PostgresStore::missing_privileges(self).await.map(Some)
        }

        async fn renew_identity(&self, keep: bool) -> Result<(), Box<dyn Error>> {
            match keep {
                true => self.remember_history().await?,
                false => PostgresStore::renew_identity(self).await?,
            }
            Ok(())
        }

        fn copies(&self) -> Copies {
            Copies::NotKnown
        }
    }
}

#[cfg(feature = "mysql")]
mod mysql {
    use std::error::Error;

    use async_trait::async_trait;
    use idem_core::{Durability, MissingPrivilege, Purge, StoreError};
    use idem_mysql::{MySqlConfig, MySqlStore};

    use super::{Copies, Examination, Level, Store, StoreOptions};

    pub(super) async fn open(
        url: &str,
        options: &StoreOptions,
        migrating: bool,
    ) -> Result<Box<dyn Store>, Box<dyn Error>> {
        let config = MySqlConfig::new(url);
        let config = if migrating { config } else { config.without_migrating() };
        options.with_front(MySqlStore::open(config).await?)
    }

    #[async_trait]
    impl Store for MySqlStore {
        fn purge(&self) -> Option<&dyn Purge> {
            Some(self)
        }

        async fn examine(&self) -> Result<Examination, Box<dyn Error>> {
            let report = self.self_test().await?;
            let health = self.health().await?;
            let level = if report.durability.durability == Durability::Power { Level::Ok } else { Level::Weak };
            let mut lines = vec![(level, "durability", report.durability.to_string())];
            lines.extend(report.warnings.into_iter().map(|warning| (Level::Weak, "settings", warning)));
            let name = if health.version.contains("MariaDB") { "MariaDB" } else { "MySQL" };
            Ok(Examination { version: format!("{name} {}", health.version), lines })
        }

        async fn missing_privileges(&self) -> Result<Option<Vec<MissingPrivilege>>, StoreError> {
            MySqlStore::missing_privileges(self).await.map(Some)
        }

        async fn renew_identity(&self, keep: bool) -> Result<(), Box<dyn Error>> {
            match keep {
                true => Err("this store remembers no history of its server".into()),
                false => MySqlStore::renew_identity(self).await.map_err(Into::into),
            }
        }

        fn copies(&self) -> Copies {
            Copies::NotKnown
        }
    }
}

#[cfg(feature = "sqlite")]
mod sqlite {
    use std::error::Error;

    use async_trait::async_trait;
    use idem_core::Purge;
    use idem_sqlite::{SqliteConfig, SqliteStore};

    use super::{Copies, Examination, Level, Store, StoreOptions};

    pub(super) async fn open(
        url: &str,
        options: &StoreOptions,
        migrating: bool,
    ) -> Result<Box<dyn Store>, Box<dyn Error>> {
        let config = SqliteConfig::new(url);
        let config = if migrating { config } else { config.without_migrating() };
        options.with_front(SqliteStore::open(config).await?)
    }

    #[async_trait]
    impl Store for SqliteStore {
        fn purge(&self) -> Option<&dyn Purge> {
            Some(self)
        }

        async fn examine(&self) -> Result<Examination, Box<dyn Error>> {
            self.self_test().await?;
            let health = self.health().await?;
            // Each connection decides for itself, so this process cannot see how the application's are.
            let text = "commits survive a loss of power, unless the application has `dangerous_synchronous_normal`";
            let lines = vec![(Level::Ok, "durability", text.to_owned())];
            Ok(Examination { version: format!("SQLite {}", health.version), lines })
        }

        async fn renew_identity(&self, keep: bool) -> Result<(), Box<dyn Error>> {
            match keep {
                true => Err("a file has no history to remember".into()),
                false => SqliteStore::renew_identity(self).await.map_err(Into::into),
            }
        }

        fn copies(&self) -> Copies {
            Copies::NotKnown
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
            let level = if durability.level() == Durability::Power { Level::Ok } else { Level::Weak };
            let mut lines = vec![(level, "durability", durability.to_string())];
            if let Some(primary) = durability.primaries.iter().find(|primary| primary.eviction != "noeviction") {
                let text = format!(
                    "maxmemory-policy is {}: when its memory is full, Redis evicts live records, and their operations run again; set it \
                     to noeviction",
                    primary.eviction
                );
                lines.push((Level::Weak, "eviction", text));
            }
            Ok(Examination { version: format!("Redis {}", health.version), lines })
        }

        async fn renew_identity(&self, _: bool) -> Result<(), Box<dyn Error>> {
            Err("records of Redis have no identity: give the durable store behind it".into())
        }
    }
}
