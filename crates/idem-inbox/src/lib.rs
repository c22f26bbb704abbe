#![doc = include_str!("../README.md")]

mod conclusion;
mod consumer;
mod decision;
mod inbox;
#[cfg(feature = "kafka")]
mod kafka;
mod losses;
mod message;
#[cfg(feature = "nats")]
mod nats;
mod parking;
#[cfg(feature = "rabbitmq")]
mod rabbitmq;
#[cfg(feature = "redis")]
mod redis;
mod settings;

pub use self::consumer::{BrokerError, Consumer, Receipt, Subscription};
pub use self::decision::{Decision, InvalidInbox, MessageError, ParkReason};
pub use self::inbox::Inbox;
#[cfg(feature = "kafka")]
pub use self::kafka::{KafkaReceipt, KafkaSubscription};
pub use self::message::Message;
#[cfg(feature = "nats")]
pub use self::nats::{NatsError, NatsReceipt, NatsSubscription};
#[cfg(feature = "postgres")]
pub use self::parking::PostgresParking;
#[cfg(feature = "sqlite")]
pub use self::parking::SqliteParking;
pub use self::parking::{LIST_TIMEOUT, ParkedMessage, Parking};
#[cfg(feature = "rabbitmq")]
pub use self::rabbitmq::{RabbitMqReceipt, RabbitMqSubscription};
#[cfg(feature = "redis")]
pub use self::redis::{RedisStreamReceipt, RedisStreamSubscription};
pub use self::settings::{InboxSettings, SUSPECT_FROM};
