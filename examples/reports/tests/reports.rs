//! The program with its clients: on each store, across restarts and kills.
#![expect(clippy::unwrap_used, reason = "a test says what it expects by failing")]

mod client;

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use idem_schemas::Schema;
use serde_json::Value;
use tempfile::TempDir;

const PATIENCE: Duration = Duration::from_secs(60);

/// The program, killed when dropped.
struct Program {
    process: Child,
    address: String,
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Where a program keeps its records.
struct Place {
    args: Vec<String>,
    folder: TempDir,
    _schema: Schema,
}

struct Answer {
    status: u16,
    head: String,
    body: String,
}

impl Answer {
    fn location(&self) -> &str {
        self.head.lines().find_map(|line| line.strip_prefix("location: ")).unwrap()
    }

    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap()
    }
}

impl Place {
    fn new(url: &str) -> Self {
        let schema = Schema::new();
        let args = ["--store", url, "--schema", &schema.name, "--lease-ms", "1000"];
        let args = args.map(str::to_owned).into();
        Self { args, folder: TempDir::new().unwrap(), _schema: schema }
    }

    fn all() -> Vec<Self> {
        vec![
            Self::new("sqlite://reports.db"),
            Self::new(&idem_servers::postgres_url()),
            Self::new(&idem_servers::redis_url()),
        ]
    }

    fn start(&self, more: &[&str]) -> Program {
        self.start_at("127.0.0.1:0", more)
    }

    fn start_at(&self, address: &str, more: &[&str]) -> Program {
        let mut process = Command::new(env!("CARGO_BIN_EXE_reports"))
            .args(&self.args)
            .args(["--listen", address])
            .args(more)
            .current_dir(&self.folder)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().trim_start_matches("listening on http://").to_owned();
        assert!(!address.is_empty(), "the program did not start");
        Program { process, address }
    }
}

impl Program {
    fn send(&self, request: &str) -> Answer {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let head = head.to_ascii_lowercase().replace('\r', "");
        let body = body.to_owned();
        Answer { status, head, body }
    }

    fn post(&self, key: &str, year: i64) -> Answer {
        let body = format!(r#"{{"year":{year}}}"#);
        self.send(&format!(
            "POST /reports HTTP/1.1\r\nHost: reports\r\nAuthorization: Bearer acme\r\nIdempotency-Key: \"{key}\"\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
            body.len()
        ))
    }

    fn get(&self, path: &str, tenant: &str) -> Answer {
        let authorization = format!("Authorization: Bearer {tenant}");
        self.send(&format!("GET {path} HTTP/1.1\r\nHost: reports\r\n{authorization}\r\nConnection: close\r\n\r\n"))
    }

    /// The state of a job that has ended.
    fn ended(&self, location: &str) -> Value {
        let give_up_at = Instant::now() + PATIENCE;
        loop {
            let shown = self.get(location, "acme");
            assert_eq!(shown.status, 200, "{}", shown.body);
            let state = shown.json();
            if !matches!(state["state"].as_str(), Some("waiting" | "running")) {
                return state;
            }
            assert!(Instant::now() < give_up_at, "{state}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

#[test]
fn a_repeat_gets_the_same_202_and_with_the_option_the_report_across_restarts() {
    for place in Place::all() {
        let api = place.start(&["--role", "api"]);
        let first = api.post("k1", 2025);
        assert_eq!(first.status, 202, "{}", first.body);
        drop(api);
        // Nobody has worked yet.
        let continued = place.start(&["--role", "api", "--final-answers"]);
        let waiting = continued.post("k1", 2025);
        assert_eq!((waiting.status, &waiting.body), (202, &first.body));
        assert_eq!(continued.get(first.location(), "acme").json()["state"], "waiting");
        assert_eq!(continued.get(first.location(), "other").status, 404);
        assert_eq!(continued.post("k1", 2024).status, 422, "it is another request");
        drop(continued);
        let both = place.start(&["--final-answers"]);
        let state = both.ended(first.location());
        assert_eq!((&state["state"], &state["result"]["status"]), (&"completed".into(), &201.into()));
        let last = both.post("k1", 2025);
        assert_eq!(last.status, 201);
        assert_eq!(last.json()["pages"], 7);
        assert!(last.head.contains("idempotency-replayed: true"), "{}", last.head);
        drop(both);
        let plain = place.start(&[]);
        let repeat = plain.post("k1", 2025);
        assert_eq!((repeat.status, &repeat.body, repeat.location()), (202, &first.body, first.location()));
    }
}

#[test]
fn a_failure_is_the_final_answer() {
    for place in Place::all() {
        let program = place.start(&["--final-answers"]);
        let first = program.post("k1", 1066);
        assert_eq!(first.status, 202);
        assert_eq!(program.ended(first.location())["state"], "failed");
        assert_eq!(program.post("k1", 1066).status, 422);
    }
}

#[test]
fn a_job_that_kills_every_worker_is_parked_and_others_go_on() {
    for place in Place::all() {
        let api = place.start(&["--role", "api", "--final-answers"]);
        let poison = api.post("poison", 1999);
        let innocent = api.post("innocent", 2025);
        let give_up_at = Instant::now() + PATIENCE * 2;
        let mut workers = 0;
        // Each worker dies of the poison.
        let parked = loop {
            let mut worker = place.start(&["--role", "worker"]);
            workers += 1;
            while worker.process.try_wait().unwrap().is_none() {
                let answer = api.post("poison", 1999);
                if answer.status != 202 {
                    break;
                }
                assert!(Instant::now() < give_up_at, "after {workers} workers");
                std::thread::sleep(Duration::from_millis(20));
            }
            let answer = api.post("poison", 1999);
            if answer.status != 202 {
                break answer;
            }
        };
        assert_eq!(parked.status, 500, "{}", parked.body);
        assert!(workers > 5, "{workers} workers");
        assert_eq!(api.get(poison.location(), "acme").json()["state"], "failed");
        let _worker = place.start(&["--role", "worker"]);
        assert_eq!(api.ended(innocent.location())["state"], "completed");
    }
}

#[test]
fn a_job_that_does_not_begin_in_time_is_504() {
    for place in Place::all() {
        let api = place.start(&["--role", "api", "--final-answers", "--deadline-s", "1"]);
        assert_eq!(api.post("k1", 2025).status, 202);
        assert_eq!(api.post("k1", 2025).status, 202);
        std::thread::sleep(Duration::from_millis(1100));
        let overdue = api.post("k1", 2025);
        assert_eq!(overdue.status, 504, "{}", overdue.body);
        assert!(overdue.body.contains("job-overdue"), "{}", overdue.body);
    }
}
