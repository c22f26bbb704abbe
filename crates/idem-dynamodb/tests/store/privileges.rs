//! The actions that the README lists, on an emulator that checks policies. The words of a refusal are those of AWS, put into the emulator.

use std::fmt::Write as _;

use aws_sdk_dynamodb::Client;
use aws_sdk_dynamodb::config::Credentials;
use idem_core::{
    AcquireOutcome, IdempotencyStore, OwnerOutcome, Settlement, StoreError, StoreErrorKind, StoredResponse,
};
use idem_dynamodb::{DynamoConfig, DynamoStore};
use idem_servers::DynamoDb;
use idem_testkit::fixture::{KEPT, repeat_of, request};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::support::client;

const TABLE: &str = "idem_records";

/// What the README lists, in JSON.
fn actions() -> Vec<&'static str> {
    let (_, list) = include_str!("../../README.md").split_once("```json\n").unwrap();
    let (list, _) = list.split_once("```").unwrap();
    list.split('"').skip(1).step_by(2).collect()
}

/// A moto with a table and a user, who may do what [`allow_all_but`](Self::allow_all_but) says.
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
        // The emulator checks no policy for this many requests.
        post(&self.emulator, "/moto-api/reset-auth", "", "1000").await;
        let actions = actions().into_iter().filter(|action| Some(*action) != denied);
        let actions: Vec<_> = actions.map(|action| format!("\"{action}\"")).collect();
        // The emulator knows no single tables in policies.
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

/// A small answer, a large one in separate items, their replays, and a release.
async fn use_every_action(client: Client) -> Result<(), StoreError> {
    let config = DynamoConfig::new(client.clone(), TABLE).renewals(client);
    let store = DynamoStore::open(config).await?;
    let settlement = |size| Settlement::Completed(StoredResponse::new(200, vec![b'x'; size]));
    for settlement in [settlement(10), settlement(600_000), Settlement::Released] {
        let request = request();
        let AcquireOutcome::Acquired(lease) = store.acquire(&request).await? else { panic!("the key is new") };
        assert_eq!(store.renew(&lease, request.term).await?, OwnerOutcome::Applied);
        assert_eq!(store.settle(&lease, &settlement, KEPT).await?, OwnerOutcome::Applied);
        let again = store.acquire(&repeat_of(&request)).await?;
        let is_released = matches!(settlement, Settlement::Released);
        assert!(matches!(again, AcquireOutcome::Replay(_)) != is_released, "{again:?}");
    }
    Ok(())
}

#[tokio::test]
async fn the_actions_of_the_readme_are_enough_and_a_missing_one_is_named() {
    for denied in actions().into_iter().map(Some).chain([None]) {
        let guarded = Guarded::start().await;
        guarded.allow_all_but(denied).await;
        let used = use_every_action(guarded.client()).await;
        match denied {
            // The store then does not check the TTL.
            None | Some("dynamodb:DescribeTimeToLive") => used.unwrap(),
            Some(denied) => {
                let error = used.expect_err(denied);
                assert_eq!(
                    (error.kind(), error.is_indeterminate()),
                    (StoreErrorKind::Misconfigured, false),
                    "{error:?}"
                );
                assert!(error.to_string().contains(denied), "{error}");
            }
        }
    }
}
