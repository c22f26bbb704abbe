//! The table: it is made and checked.

use std::time::Duration;

use aws_sdk_dynamodb::error::{ProvideErrorMetadata, SdkError};
use aws_sdk_dynamodb::types::{
    AttributeDefinition, BillingMode, KeySchemaElement, KeyType, ScalarAttributeType, TableDescription, TableStatus,
    TimeToLiveSpecification, TimeToLiveStatus,
};
use idem_core::{OwnerToken, StoreError, StoreErrorKind};
use tokio::time::{Instant, sleep};

use crate::attributes::{bytes, bytes_of, key_of};
use crate::error::{damaged, failed};
use crate::records::{ABSENT, Records};

/// The key of the table, and the types of its attributes.
const KEY: [(&str, KeyType, ScalarAttributeType); 2] =
    [("pk", KeyType::Hash, ScalarAttributeType::B), ("sk", KeyType::Range, ScalarAttributeType::S)];

/// The attribute by which the service removes expired items.
const TTL: &str = "ttl";

/// How long a new table is awaited. The service makes one within seconds.
const PATIENCE: Duration = Duration::from_secs(120);
const PAUSE: Duration = Duration::from_millis(500);

pub(crate) async fn create(records: &Records) -> Result<(), StoreError> {
    let what = "create the table";
    let mut create = records.client.create_table().table_name(&records.table).billing_mode(BillingMode::PayPerRequest);
    for (name, role, kind) in KEY {
        let attribute = AttributeDefinition::builder().attribute_name(name).attribute_type(kind).build();
        let key = KeySchemaElement::builder().attribute_name(name).key_type(role).build();
        create = create.attribute_definitions(attribute.map_err(impossible)?).key_schema(key.map_err(impossible)?);
    }
    match create.send().await {
        Ok(_) => {}
        Err(SdkError::ServiceError(service)) if service.err().is_resource_in_use_exception() => {}
        Err(error) => return Err(failed(what, true, error)),
    }
    let deadline = Instant::now() + PATIENCE;
    loop {
        match describe(records, what).await {
            Ok(table) if table.table_status == Some(TableStatus::Active) => break,
            // A new table may be unknown to some servers of the service for a moment.
            Err(error) if error.kind() != StoreErrorKind::Misconfigured => return Err(error),
            Ok(_) | Err(_) => {}
        }
        if Instant::now() >= deadline {
            let message = format!("could not {what}: it is not active after {PATIENCE:?}; call it again");
            return Err(StoreError::new(StoreErrorKind::Timeout, message));
        }
        sleep(PAUSE).await;
    }
    if has_ttl(records).await? != Some(false) {
        return Ok(());
    }
    let ttl = TimeToLiveSpecification::builder().enabled(true).attribute_name(TTL).build().map_err(impossible)?;
    let update = records.client.update_time_to_live().table_name(&records.table).time_to_live_specification(ttl);
    match update.send().await {
        Ok(_) => Ok(()),
        // Another process was first.
        Err(_) if has_ttl(records).await? == Some(true) => Ok(()),
        Err(error) => Err(failed("set the TTL of the table", true, error)),
    }
}

/// Does not happen: all that a builder requires is given.
fn impossible(error: aws_sdk_dynamodb::error::BuildError) -> StoreError {
    StoreError::new(StoreErrorKind::Misconfigured, "the client cannot make such a request").with_source(error)
}

async fn describe(records: &Records, what: &str) -> Result<TableDescription, StoreError> {
    let described = records.client.describe_table().table_name(&records.table).send().await;
    let described = described.map_err(|error| failed(what, false, error))?;
    described.table.ok_or_else(|| StoreError::new(StoreErrorKind::Unavailable, format!("could not {what}: no answer")))
}

pub(crate) async fn check(records: &Records) -> Result<(), StoreError> {
    let what = "open the store";
    let table = describe(records, what).await?;
    if table.table_status != Some(TableStatus::Active) && table.table_status != Some(TableStatus::Updating) {
        let status = table.table_status.as_ref().map_or("unknown", TableStatus::as_str);
        let message = format!("could not {what}: the table {} is {status}, and not active", records.table);
        return Err(StoreError::new(StoreErrorKind::Unavailable, message));
    }
    let has_key = KEY.iter().all(|(name, role, kind)| {
        let is_in_key = table.key_schema().iter().any(|key| key.attribute_name == *name && key.key_type == *role);
        let has_kind = |found: &AttributeDefinition| found.attribute_name == *name && found.attribute_type == *kind;
        is_in_key && table.attribute_definitions().iter().any(has_kind)
    });
    if !has_key {
        let message = format!(
            "could not {what}: the table {} needs the partition key pk of the type B and the sort key sk of the type S",
            records.table
        );
        return Err(StoreError::new(StoreErrorKind::Misconfigured, message));
    }
    if has_ttl(records).await? == Some(false) {
        tracing::warn!(
            table = records.table,
            "the table has no TTL on the attribute ttl, so expired records stay until a purge"
        );
    }
    records.clock.now().map(drop)
}

/// Whether the service removes expired items; `None` if the client may not ask.
async fn has_ttl(records: &Records) -> Result<Option<bool>, StoreError> {
    let described = match records.client.describe_time_to_live().table_name(&records.table).send().await {
        Ok(described) => described.time_to_live_description,
        Err(SdkError::ServiceError(service)) if service.err().code() == Some("AccessDeniedException") => {
            return Ok(None);
        }
        Err(error) => return Err(failed("ask for the TTL of the table", false, error)),
    };
    Ok(Some(described.is_some_and(|ttl| {
        let is_on = matches!(ttl.time_to_live_status, Some(TimeToLiveStatus::Enabled | TimeToLiveStatus::Enabling));
        is_on && ttl.attribute_name.as_deref() == Some(TTL)
    })))
}

/// The identity of the records, which the first store makes.
pub(crate) async fn identity(records: &Records) -> Result<[u8; 16], StoreError> {
    let what = "read the identity of the records";
    let key = || key_of(b"identity", "identity");
    let read = async || -> Result<Option<[u8; 16]>, StoreError> {
        let get = records.client.get_item().table_name(&records.table).consistent_read(true).set_key(Some(key()));
        let item = get.send().await.map_err(|error| failed(what, false, error))?.item;
        let Some(item) = item else { return Ok(None) };
        let identity = bytes_of(&item, "identity")?.and_then(|identity| identity.try_into().ok());
        identity.map(Some).ok_or_else(|| damaged("identity"))
    };
    if let Some(identity) = read().await? {
        return Ok(identity);
    }
    let mut item = key();
    item.insert("identity".to_owned(), bytes(*OwnerToken::random().as_bytes()));
    let put = records.client.put_item().table_name(&records.table).set_item(Some(item)).condition_expression(ABSENT);
    match put.send().await {
        Ok(_) => {}
        // Another store was first.
        Err(SdkError::ServiceError(service)) if service.err().is_conditional_check_failed_exception() => {}
        Err(error) => return Err(failed(what, true, error)),
    }
    read().await?.ok_or_else(|| damaged("identity"))
}
