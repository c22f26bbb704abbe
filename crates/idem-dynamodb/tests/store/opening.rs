//! Tables that are missing or wrong, and services that are away.

use aws_sdk_dynamodb::types::{AttributeDefinition, BillingMode, KeySchemaElement, KeyType, ScalarAttributeType};
use idem_core::{DurableStore, IdempotencyStore, StoreErrorKind};
use idem_dynamodb::{DynamoConfig, DynamoStore};
use idem_servers::DynamoDb;
use idem_testkit::fixture::request;

use crate::support::{BOTH, Table, client};

#[tokio::test]
async fn a_table_that_is_missing_is_told_as_such() {
    for emulator in BOTH {
        let config = DynamoConfig::new(client(&emulator.url()), "nowhere");
        let error = DynamoStore::open(config).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{emulator:?}: {error:?}");
        assert!(error.to_string().contains("there is no such table"), "{error}");
    }
}

#[tokio::test]
async fn a_table_with_other_keys_is_refused() {
    for emulator in BOTH {
        let (client, name) = (client(&emulator.url()), "other_keys");
        let attribute = AttributeDefinition::builder().attribute_name("pk").attribute_type(ScalarAttributeType::S);
        let key = KeySchemaElement::builder().attribute_name("pk").key_type(KeyType::Hash);
        let create = client.create_table().table_name(name).billing_mode(BillingMode::PayPerRequest);
        let create = create.attribute_definitions(attribute.build().unwrap()).key_schema(key.build().unwrap());
        create.send().await.unwrap();
        let error = DynamoStore::open(DynamoConfig::new(client, name)).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{emulator:?}");
        assert!(error.to_string().contains("the partition key pk of the type B"), "{error}");
    }
}

#[tokio::test]
async fn a_table_is_made_once_and_all_stores_have_its_identity() {
    for emulator in BOTH {
        let table = Table::new(emulator).await;
        let first = table.store().await;
        DynamoStore::create_table(&table.config()).await.unwrap();
        assert_eq!(table.store().await.identity(), first.identity());
        assert_ne!(Table::new(emulator).await.store().await.identity(), first.identity());
    }
}

#[tokio::test]
async fn a_service_that_is_away_is_told_as_such() {
    let mut emulator = DynamoDb::dynoxide().unwrap();
    let config = DynamoConfig::new(client(&emulator.url()), "table");
    DynamoStore::create_table(&config).await.unwrap();
    let store = DynamoStore::open(config).await.unwrap();
    emulator.kill().unwrap();
    let error = store.acquire(&request()).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable);
    assert!(error.is_indeterminate(), "a write may have taken effect: {error:?}");
    assert!(!store.peek(&request().id).await.unwrap_err().is_indeterminate());
}
