#![doc = include_str!("../README.md")]

#[cfg(feature = "kafka")]
mod kafka;
mod message;
#[cfg(feature = "nats")]
mod nats;
mod outbox;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "rabbitmq")]
mod rabbitmq;
#[cfg(feature = "redis")]
mod redis;
mod relay;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod row;
#[cfg(feature = "sqlite")]
mod sqlite;

#[cfg(feature = "kafka")]
pub use self::kafka::KafkaPublisher;
pub use self::message::{InvalidMessage, MessageToSend};
#[cfg(feature = "nats")]
pub use self::nats::NatsPublisher;
pub use self::outbox::{Backlog, Claim, Outbox, OutboxError, StoredMessage};
#[cfg(feature = "postgres")]
pub use self::postgres::PostgresOutbox;
#[cfg(feature = "rabbitmq")]
pub use self::rabbitmq::RabbitMqPublisher;
#[cfg(feature = "redis")]
pub use self::redis::RedisStreamPublisher;
pub use self::relay::{Publisher, PublisherError, Relay};
#[cfg(feature = "sqlite")]
pub use self::sqlite::SqliteOutbox;
