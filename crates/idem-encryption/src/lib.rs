#![doc = include_str!("../README.md")]

mod by_hand;
#[cfg(feature = "compression")]
mod compression;
mod config;
mod envelope;
mod fault;
mod keys;
mod operate;
mod repeat;
mod scope;
mod sealer;
mod store;
mod transaction;
mod unopened;

pub use config::EncryptionConfig;
pub use keys::{DuplicateKeyId, Keys};
pub use sealer::is_sealed;
pub use store::EncryptedStore;
