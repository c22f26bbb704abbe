//! The actions that the README lists, on an emulator that checks policies.

use std::fmt::Write as _;

use aws_sdk_dynamodb::Client;
use aws_sdk_dynamodb::config::Credentials;
use idem_core::{
    Acquire, AcquireOutcome, IdempotencyStore, OwnerOutcome, RecordId, Settlement, StoreError, StoreErrorKind,
    StoredResponse, TimeOffset,
};
use idem_dynamodb::{DynamoConfig, DynamoStore};
use idem_servers::DynamoDb;
use idem_testkit::fixture::{KEPT, request};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::support::client;

const TABLE: &str = "idem_records";

/// What the README lists.
const ACTIONS: [&str; 6] = ["DescribeTable", "DescribeTimeToLive", "GetItem", "PutItem", "DeleteItem", "Query"];

/// A moto with a table and a user, who may do what [`allow`](Self::allow) says.
struct Guarded {
    emulator: DynamoDb,
    access_key: (String, String),
}

impl Guarded {
    async fn start() -> Self {
        let emulator = DynamoDb::moto().unwrap();
        DynamoStore::create_table(&DynamoConfig::new(client(&emulator.url()), TABLE)).await.unwrap();
        iam(&emulator, &[("Action", "CreateUser"), ("UserName", "app")]).await;
        let keys = iam(&emulator, &[("Action", "CreateAccessKey"), ("UserName", "app")]).await;
        let member = |name: &str| {
            let (_, rest) = keys.split_once(&format!("<{name}>")).unwrap();
            rest.split_once('<').unwrap().0.to_owned()
        };
        let access_key = (member("AccessKeyId"), member("SecretAccessKey"));
        Self { emulator, access_key }
    }

    /// Lets the user do all that the README lists except `denied`, and nothing else.
    async fn allow_all_but(&self, denied: Option<&str>) {
        // Policies are checked from the next request on, or are not.
        post(&self.emulator, "/moto-api/reset-auth", "", "1000").await;
        let actions = ACTIONS.iter().filter(|action| Some(**action) != denied);
        let actions: Vec<_> = actions.map(|action| format!("\"dynamodb:{action}\"")).collect();
        let statement = format!(r#"{{"Effect": "Allow", "Action": [{}], "Resource": "*"}}"#, actions.join(","));
        let policy = format!(r#"{{"Version": "2012-10-17", "Statement": [{statement}]}}"#);
        let user = [("UserName", "app"), ("PolicyName", "records"), ("PolicyDocument", &*policy)];
        iam(&self.emulator, &[&[("Action", "PutUserPolicy")], &user[..]].concat()).await;
        post(&self.emulator, "/moto-api/reset-auth", "", "0").await;
    }

    /// A client of the user.
    fn client(&self) -> Client {
        let (id, secret) = &self.access_key;
        let credentials = Credentials::new(id, secret, None, None, "tests");
        let config = client(&self.emulator.url()).config().to_builder().credentials_provider(credentials);
        Client::from_conf(config.build())
    }
}

/// A request to the service that keeps users.
async fn iam(emulator: &DynamoDb, parameters: &[(&str, &str)]) -> String {
    let mut body = "Version=2010-05-08".to_owned();
    for (name, value) in parameters {
        write!(body, "&{name}=").unwrap();
        value.bytes().for_each(|byte| write!(body, "%{byte:02x}").unwrap());
    }
    let credential = "Credential=key/20260101/us-east-1/iam/aws4_request, SignedHeaders=host, Signature=0";
    let form = "content-type: application/x-www-form-urlencoded\r\n";
    post(emulator, "/", &format!("authorization: AWS4-HMAC-SHA256 {credential}\r\n{form}"), &body).await
}

async fn post(emulator: &DynamoDb, path: &str, headers: &str, body: &str) -> String {
    let host = emulator.url().split_off("http://".len());
    let mut stream = TcpStream::connect(&host).await.unwrap();
    let head = format!("POST {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n{headers}");
    let message = format!("{head}content-length: {}\r\n\r\n{body}", body.len());
    stream.write_all(message.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.split(' ').nth(1) == Some("200"), "{answer}");
    answer
}

/// A small answer, a large one in items of its own, and their replays.
async fn use_every_action(client: Client) -> Result<(), StoreError> {
    let offset = TimeOffset::default();
    let config = DynamoConfig::new(client.clone(), TABLE).renewals(client).time_offset(offset.clone());
    let store = DynamoStore::open(config).await?;
    for (number, size) in [(1, 10), (2, 600_000)] {
        let request = Acquire { id: RecordId::from_bytes([number; 32]), ..request() };
        let AcquireOutcome::Acquired(lease) = store.acquire(&request).await? else { panic!("the key is used") };
        assert_eq!(store.renew(&lease, request.term).await?, OwnerOutcome::Applied);
        let settlement = Settlement::Completed(StoredResponse::new(200, vec![b'x'; size]));
        assert_eq!(store.settle(&lease, &settlement, KEPT).await?, OwnerOutcome::Applied);
        assert!(matches!(store.acquire(&request).await?, AcquireOutcome::Replay(_)));
        let late = Acquire { id: RecordId::from_bytes([number + 100; 32]), ..request };
        let AcquireOutcome::Acquired(lease) = store.acquire(&late).await? else { panic!("the key is used") };
        offset.advance(2 * (late.term.lease + late.term.retention));
        assert_eq!(store.settle(&lease, &settlement, KEPT).await?, OwnerOutcome::LeaseLost);
    }
    Ok(())
}

#[tokio::test]
async fn the_actions_of_the_readme_are_enough_and_a_missing_one_is_named() {
    let readme = include_str!("../../README.md");
    for denied in ACTIONS.map(Some).into_iter().chain([None]) {
        let guarded = Guarded::start().await;
        guarded.allow_all_but(denied).await;
        let used = use_every_action(guarded.client()).await;
        match denied {
            // The store then does not check the TTL, or leaves to it the parts of answers that have lost their record.
            None | Some("DescribeTimeToLive" | "DeleteItem") => used.unwrap(),
            Some(denied) => {
                let error = used.expect_err(denied);
                assert_eq!(
                    (error.kind(), error.is_indeterminate()),
                    (StoreErrorKind::Misconfigured, false),
                    "{error:?}"
                );
                assert!(error.to_string().contains(&format!("dynamodb:{denied}")), "{error}");
            }
        }
        assert!(denied.is_none_or(|denied| readme.contains(&format!("\"dynamodb:{denied}\""))), "{denied:?}");
    }
}
