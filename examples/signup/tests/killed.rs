//! Kills the program before and after each of its calls, and starts it again: each service did its work once.
#![expect(clippy::unwrap_used, reason = "a test says what it expects by failing")]

use std::process::{Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::extract::{Request, State};
use axum::http::Method;
use axum::middleware::{self, Next};
use axum::response::Response;
use tempfile::TempDir;
use tokio::process::{Child, Command};
use tokio::sync::Notify;

#[path = "../src/services.rs"]
mod services;

/// Where the services stop answering: before or after the work of a call, each counted from 0.
#[derive(Clone)]
struct Stop {
    at: Option<usize>,
    points: Arc<AtomicUsize>,
    reached: Arc<Notify>,
}

impl Stop {
    async fn point(&self) {
        if Some(self.points.fetch_add(1, Ordering::SeqCst)) == self.at {
            self.reached.notify_one();
            std::future::pending::<()>().await;
        }
    }
}

async fn stop_or_answer(State(stop): State<Stop>, request: Request, next: Next) -> Response {
    if request.method() == Method::GET {
        return next.run(request).await;
    }
    stop.point().await;
    let answer = next.run(request).await;
    stop.point().await;
    answer
}

/// The services, and a folder for the program's store.
struct World {
    stop: Stop,
    url: String,
    folder: TempDir,
}

impl World {
    async fn new(stops_at: Option<usize>) -> Self {
        let stop = Stop { at: stops_at, points: Arc::default(), reached: Arc::default() };
        let router = services::router().layer(middleware::from_fn_with_state(stop.clone(), stop_or_answer));
        let url = services::serve(router).await.unwrap();
        Self { stop, url, folder: tempfile::tempdir().unwrap() }
    }

    /// What the services have done and not taken back.
    async fn made(&self) -> Vec<String> {
        reqwest::get(format!("{}/made", self.url)).await.unwrap().json().await.unwrap()
    }

    fn start(&self, address: &str) -> Child {
        let mut program = Command::new(env!("CARGO_BIN_EXE_signup"));
        program.arg(address).current_dir(self.folder.path()).env("BILLING", &self.url).env("MAIL", &self.url);
        program.stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true).spawn().unwrap()
    }

    async fn run(&self, address: &str) -> Output {
        self.start(address).wait_with_output().await.unwrap()
    }
}

fn text(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned()).concat()
}

/// Kills the program at each point, one after the other, each in its own world, all at once; and lets it end then.
async fn kill_everywhere(
    address: &'static str,
    points: usize,
    expected: &'static [&'static str],
    answer: &'static str,
) {
    let kill = |at| async move {
        let world = World::new(Some(at)).await;
        let mut program = world.start(address);
        world.stop.reached.notified().await;
        program.kill().await.unwrap();
        for _ in 0..2 {
            let ended = text(&world.run(address).await);
            assert!(ended.contains(answer), "killed at {at}: {ended}");
            assert_eq!(world.made().await, expected, "killed at {at}");
        }
    };
    let kills: Vec<_> = (0..points).map(|at| tokio::spawn(kill(at))).collect();
    for kill in kills {
        kill.await.unwrap();
    }
    let world = World::new(None).await;
    let ended = text(&world.run(address).await);
    assert!(ended.contains(answer), "{ended}");
    assert_eq!(world.stop.points.load(Ordering::SeqCst), points, "the program has other points");
}

#[tokio::test(flavor = "multi_thread")]
async fn each_call_takes_effect_once_wherever_the_program_is_killed() {
    kill_everywhere("anna@example.com", 6, &["customers", "mails", "subscriptions"], r#""customer":"customers-"#).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_mail_takes_everything_back_wherever_the_program_is_killed() {
    kill_everywhere("nowhere", 10, &[], "and the steps before it are undone: the service refused: 422").await;
}

#[tokio::test]
async fn without_services_the_program_pretends_them() {
    let folder = tempfile::tempdir().unwrap();
    let mut program = Command::new(env!("CARGO_BIN_EXE_signup"));
    let program = program.arg("anna@example.com").current_dir(folder.path()).env_remove("BILLING").env_remove("MAIL");
    let first = text(&program.output().await.unwrap());
    assert!(first.contains("two pretended services listen at"), "{first}");
    assert!(first.contains("signed up: {"), "{first}");
    let again = text(&program.output().await.unwrap());
    assert!(again.contains("signed up before: {"), "{again}");
}
