//! Stores on emulators that all tests share, each in a separate table.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use aws_sdk_dynamodb::Client;
use aws_sdk_dynamodb::config::{BehaviorVersion, Credentials, Region};
use aws_sdk_dynamodb::types::AttributeValue;
use idem_core::TimeOffset;
use idem_dynamodb::{DynamoConfig, DynamoStore};
use idem_servers::DynamoDb;
use idem_testkit::Subject;

/// As long as a test may take on a loaded machine.
pub const PRECISION: Duration = Duration::from_secs(10);

/// Which emulator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Emulator {
    Moto,
    Dynoxide,
}

pub const BOTH: [Emulator; 2] = [Emulator::Moto, Emulator::Dynoxide];

impl Emulator {
    /// The emulator that the tests of this process share. It ends with the process.
    pub fn url(self) -> String {
        static MOTO: OnceLock<DynamoDb> = OnceLock::new();
        static DYNOXIDE: OnceLock<DynamoDb> = OnceLock::new();
        match self {
            Self::Moto => MOTO.get_or_init(|| DynamoDb::moto().unwrap()).url(),
            Self::Dynoxide => DYNOXIDE.get_or_init(|| DynamoDb::dynoxide().unwrap()).url(),
        }
    }
}

/// A client of the emulator at `url`, which takes any credentials.
pub fn client(url: &str) -> Client {
    let config = aws_sdk_dynamodb::Config::builder()
        .behavior_version(BehaviorVersion::latest())
        .http_client(aws_smithy_http_client::Builder::new().build_http())
        .credentials_provider(Credentials::new("key", "secret", None, None, "tests"))
        .region(Region::new("eu-west-1"))
        .endpoint_url(url);
    Client::from_conf(config.build())
}

/// A separate table.
pub struct Table {
    pub name: String,
    pub client: Client,
    pub offset: TimeOffset,
}

impl Table {
    pub async fn new(emulator: Emulator) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("idem_{}", COUNT.fetch_add(1, Ordering::Relaxed));
        let table = Self { name, client: client(&emulator.url()), offset: TimeOffset::default() };
        DynamoStore::create_table(&table.config()).await.unwrap();
        table
    }

    pub fn config(&self) -> DynamoConfig {
        let renewals = self.client.clone();
        DynamoConfig::new(self.client.clone(), &self.name).renewals(renewals).time_offset(self.offset.clone())
    }

    /// A store that has seen nothing yet, as in another process.
    pub async fn store(&self) -> DynamoStore {
        DynamoStore::open(self.config()).await.unwrap()
    }

    /// Puts an item that expired long ago.
    pub async fn put(&self, partition: &[u8], sort: &str) {
        let put = self.client.put_item().table_name(&self.name);
        let put = put.item("pk", AttributeValue::B(partition.to_vec().into()));
        let put = put.item("sk", AttributeValue::S(sort.to_owned()));
        put.item("expires_at", AttributeValue::N("1700000000".to_owned())).send().await.unwrap();
    }

    /// Removes one of the items whose sort key begins so.
    pub async fn remove_one(&self, sort: &str) {
        let items = self.client.scan().table_name(&self.name).consistent_read(true).send().await.unwrap();
        let item = items.items().iter().find(|item| item["sk"].as_s().unwrap().starts_with(sort)).unwrap();
        let remove = self.client.delete_item().table_name(&self.name);
        remove.key("pk", item["pk"].clone()).key("sk", item["sk"].clone()).send().await.unwrap();
    }

    /// How many items the table has with this sort key, or one that begins so.
    pub async fn items(&self, sort: &str) -> usize {
        let (mut count, mut from) = (0, None);
        loop {
            let scan = self.client.scan().table_name(&self.name).consistent_read(true).set_exclusive_start_key(from);
            let page = scan.send().await.unwrap();
            count += page.items().iter().filter(|item| item["sk"].as_s().unwrap().starts_with(sort)).count();
            from = page.last_evaluated_key;
            if from.is_none() {
                return count;
            }
        }
    }
}

/// A store in a new table, as the conformance suite takes it.
pub async fn subject(emulator: Emulator) -> Subject {
    let table = Table::new(emulator).await;
    let store = Arc::new(table.store().await);
    let subject = Subject::new(store.clone(), store.clone(), Arc::new(table.offset.clone()));
    subject.operated_by(store.clone()).inspected_by(store).with_precision(PRECISION)
}
