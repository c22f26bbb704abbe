//! Signs a customer up at two services that are not ours: one for billing, one for mail.
//!
//! Each call is a step with its own key. Kill the program anywhere and start it again: it goes on behind the last completed
//! step. If the mail service refuses the address, the program takes back what it made at the billing service.

mod services;

use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use idem_core::engine::{Context, ErrorMeaning, Idempotency, Operation, RunError, Settings, StepError, StepToUndo};
use idem_core::{Fingerprint, Scope};
use idem_sqlite::{SqliteConfig, SqliteStore};
use reqwest::{Client, Method, StatusCode};
use serde_json::{Value, json};

/// Where the services are.
#[derive(Clone)]
struct Services {
    client: Client,
    billing: String,
    mail: String,
}

/// Why a service did not do what it was asked to.
#[derive(Debug, thiserror::Error)]
enum CallError {
    #[error("the service refused: {0}")]
    Refused(StatusCode),
    #[error("the service failed: {0}")]
    Failed(StatusCode),
    #[error("the service does not answer: {}", root_of(.0))]
    Away(#[from] reqwest::Error),
}

/// The text of an error of reqwest says only where it happened.
fn root_of(error: &reqwest::Error) -> String {
    let mut root: &dyn Error = error;
    while let Some(cause) = root.source() {
        root = cause;
    }
    root.to_string()
}

impl CallError {
    /// A refusal took no effect, and comes again however often the program asks. After the other errors it may have done
    /// its work.
    fn meaning(&self) -> ErrorMeaning {
        match self {
            Self::Refused(_) => ErrorMeaning::Final,
            Self::Failed(_) | Self::Away(_) => ErrorMeaning::Fault,
        }
    }
}

impl Services {
    async fn call(self, method: Method, url: String, key: String, body: Value) -> Result<Value, CallError> {
        let request = self.client.request(method, url).header("Idempotency-Key", key).json(&body);
        let answer = request.send().await?;
        match answer.status() {
            status if status.is_success() => Ok(answer.json().await?),
            // 409 and 429 ask for patience.
            status if status.is_server_error() || matches!(status.as_u16(), 408 | 409 | 429) => {
                Err(CallError::Failed(status))
            }
            status => Err(CallError::Refused(status)),
        }
    }

    /// Undoes a step of the billing service by the key of the step, so that its answer need not be known.
    fn take_back(&self) -> impl FnOnce(StepToUndo<Value>) -> BoxedUndo + Send + use<> {
        let services = self.clone();
        move |step| {
            let url = format!("{}/made-by?key={}", services.billing, step.step_key);
            Box::pin(async move { services.call(Method::DELETE, url, step.key, Value::Null).await.map(drop) })
        }
    }
}

type BoxedUndo = std::pin::Pin<Box<dyn Future<Output = Result<(), CallError>> + Send>>;

async fn sign_up(context: Context, services: Services, address: String) -> Result<Value, StepError> {
    let post = |url: String, body: Value| {
        let services = services.clone();
        move |key| services.call(Method::POST, url, key, body)
    };
    let mut steps = context.steps()?;

    let make = post(format!("{}/customers", services.billing), json!({ "address": address }));
    let customer = steps.step("customer").undo(services.take_back());
    let customer = customer.run_classified(CallError::meaning, make).await?;

    let make = post(format!("{}/subscriptions", services.billing), json!({ "customer": customer["id"] }));
    let subscription = steps.step("subscription").undo(services.take_back());
    let subscription = subscription.run_classified(CallError::meaning, make).await?;

    // A mail cannot be taken back, so it is the last step.
    let send = post(format!("{}/mails", services.mail), json!({ "to": address }));
    steps.step::<Value>("mail").run_classified(CallError::meaning, send).await?;
    Ok(json!({ "customer": customer["id"], "subscription": subscription["id"] }))
}

#[tokio::main]
async fn main() -> Result<ExitCode, Box<dyn Error>> {
    let address = std::env::args().nth(1).ok_or("usage: signup ADDRESS")?;
    let store = SqliteStore::open(SqliteConfig::new("sqlite://signup.db")).await?;
    // The lease is how long a repeat waits for a process that has died. The time for the store has to be below a sixth of it.
    let settings = Settings::new().lease(Duration::from_secs(3)).store_timeout(Duration::from_millis(450));
    let idempotency = Idempotency::at_least_once(Arc::new(store), settings);
    let services = match (std::env::var("BILLING"), std::env::var("MAIL")) {
        (Ok(billing), Ok(mail)) => (billing, mail),
        _ => {
            let url = services::serve(services::router()).await?;
            println!("two pretended services listen at {url}; BILLING and MAIL name others");
            (url.clone(), url)
        }
    };
    let client = Client::builder().timeout(Duration::from_secs(10)).build()?;
    let services = Services { client, billing: services.0, mail: services.1 };
    // The program is its own client: it asks until the operation has ended.
    loop {
        let fingerprint = Fingerprint::of_bytes("signup", address.as_bytes());
        let operation = Operation::new(Scope::new("shop", "signup"), address.parse()?, fingerprint);
        let (services, address) = (services.clone(), address.clone());
        let run = move |context| sign_up(context, services, address);
        let pause = match idempotency.run_classified(operation, StepError::meaning, run).await {
            Ok(ran) => {
                println!("{}: {}", if ran.replayed { "signed up before" } else { "signed up" }, ran.value);
                return Ok(ExitCode::SUCCESS);
            }
            Err(RunError::Failed(error)) if error.meaning() != ErrorMeaning::Final => {
                println!("{error}");
                Duration::ZERO
            }
            Err(RunError::InProgress { retry_after } | RunError::Backoff { retry_after }) => retry_after,
            Err(ended) => {
                println!("{ended}");
                return Ok(ExitCode::FAILURE);
            }
        };
        tokio::time::sleep(pause.max(Duration::from_millis(100))).await;
    }
}
