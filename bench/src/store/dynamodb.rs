//! DynamoDB on emulators: requests written by hand through the same client, and the store.
//!
//! An emulator says nothing about the latency of the service. By hand a cycle takes two requests, and a key whose owner has crashed stays in
//! progress for ever. The store takes three requests, because it reads the record before it settles it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use aws_sdk_dynamodb::Client;
use aws_sdk_dynamodb::config::retry::RetryConfig;
use aws_sdk_dynamodb::config::{BehaviorVersion, Credentials, Region};
use aws_sdk_dynamodb::types::{
    AttributeDefinition, AttributeValue, BillingMode, KeySchemaElement, KeyType, ScalarAttributeType,
};
use idem_dynamodb::{DynamoConfig, DynamoStore};
use idem_servers::DynamoDb;
use sha2::{Digest, Sha256};

use super::crowd::{CLIENTS, crowd};
use crate::contest::{hold, per_second, say};
use crate::drive::{Work, driven};
use crate::error::Error;
use crate::pace::Pace;
use crate::records::Maker;
use crate::report::Report;

const HAND: &str = "hand_records";

pub(crate) async fn run(pace: Pace, report: &mut Report) -> Result<(), Error> {
    for name in ["dynoxide", "moto"] {
        let emulator = if name == "moto" { DynamoDb::moto()? } else { DynamoDb::dynoxide()? };
        let client = client(&emulator);
        create_hand_table(&client).await?;
        let config = DynamoConfig::new(client.clone(), "idem_records");
        DynamoStore::create_table(&config).await?;
        let maker = Maker::new(Arc::new(DynamoStore::open(config).await?));
        let numbers = Arc::new(AtomicU64::new(0));
        for clients in [1, CLIENTS] {
            let client = client.clone();
            let by_hand = move |number| -> Work {
                let client = client.clone();
                Box::pin(async move { two_requests(&client, number).await })
            };
            let by_hand = driven("by hand", clients, pace.turn, &numbers, by_hand);
            let idem = driven("idem", clients, pace.turn, &numbers, maker.cycles());
            let contest = format!("DynamoDB ({name}): acquire and settle, {}", crowd(clients));
            let outcome = hold(&contest, pace.rounds, vec![by_hand, idem]).await?;
            say(&outcome, "idem", "by hand", ("cycles a second", per_second));
            report.add(outcome);
        }
    }
    Ok(())
}

/// A client of an emulator, which takes any credentials.
pub(crate) fn client(emulator: &DynamoDb) -> Client {
    let config = aws_sdk_dynamodb::Config::builder()
        .behavior_version(BehaviorVersion::latest())
        .http_client(aws_smithy_http_client::Builder::new().build_http())
        .credentials_provider(Credentials::new("key", "secret", None, None, "bench"))
        .region(Region::new("eu-west-1"))
        // As the store does, which sends each write once.
        .retry_config(RetryConfig::disabled())
        .endpoint_url(emulator.url());
    Client::from_conf(config.build())
}

async fn create_hand_table(client: &Client) -> Result<(), Error> {
    let key = AttributeDefinition::builder().attribute_name("pk").attribute_type(ScalarAttributeType::B).build()?;
    let schema = KeySchemaElement::builder().attribute_name("pk").key_type(KeyType::Hash).build()?;
    let create = client.create_table().table_name(HAND).attribute_definitions(key).key_schema(schema);
    create.billing_mode(BillingMode::PayPerRequest).send().await?;
    Ok(())
}

/// Claims the key where there is none, and settles it by its token.
async fn two_requests(client: &Client, number: u64) -> Result<(), Error> {
    let bytes = |bytes: &[u8]| AttributeValue::B(bytes.to_vec().into());
    let number_of = |number: i64| AttributeValue::N(number.to_string());
    let key = Sha256::digest(number.to_be_bytes());
    let token = uuid::Uuid::new_v4();
    let item = HashMap::from([
        ("pk".to_owned(), bytes(&key)),
        ("progress".to_owned(), number_of(1)),
        ("fingerprint".to_owned(), bytes(&[b'f'; 32])),
        ("holder".to_owned(), bytes(token.as_bytes())),
        ("expires_at".to_owned(), number_of(1_800_000_000)),
    ]);
    let claim = client.put_item().table_name(HAND).set_item(Some(item));
    claim.condition_expression("attribute_not_exists(pk)").send().await?;
    let settle = client
        .update_item()
        .table_name(HAND)
        .key("pk", bytes(&key))
        .update_expression("SET progress = :done, answer = :answer, code = :code")
        .condition_expression("holder = :holder AND progress = :running")
        .expression_attribute_values(":done", number_of(2))
        .expression_attribute_values(":running", number_of(1))
        .expression_attribute_values(":code", number_of(200))
        .expression_attribute_values(":answer", bytes(&[b'x'; 512]))
        .expression_attribute_values(":holder", bytes(token.as_bytes()));
    settle.send().await?;
    Ok(())
}
