//! The rules and the dashboard of `ops/`, on a real Prometheus that scrapes the service.

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use idem_core::engine::EventKind;
use idem_core::{ReplayKind, StateName, StoreError, StoreErrorKind};
use idem_metrics::{AuditCounters, InboxGauges, MetricsObserver, OutboxGauges};
use idem_servers::{Prometheus, promtool};
use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};
use metrics_exporter_prometheus::PrometheusBuilder;
use serde_json::Value;

use crate::support::{Backend, Contract, OPERATOR, Request, Server, eventually};

fn ops(path: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../ops")).canonicalize().unwrap().join(path)
}

fn text(path: &str) -> String {
    std::fs::read_to_string(ops(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

#[test]
fn promtool_accepts_the_rules_and_their_tests() {
    let promtool = promtool().unwrap_or_else(|error| panic!("{error}"));
    for arguments in [["check", "rules", "idem.rules.yml"], ["test", "rules", "idem.test.yml"]] {
        let output = Command::new(&promtool).args(arguments).current_dir(ops("prometheus")).output().unwrap();
        let printed = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
        assert!(output.status.success(), "promtool {arguments:?}: {printed}");
    }
}

#[test]
fn each_alert_has_a_runbook_page_and_tests_that_it_fires_and_is_silent() {
    let rules = text("prometheus/idem.rules.yml");
    let values = |key: &str| -> Vec<String> {
        rules.lines().filter_map(|line| line.trim_start().strip_prefix(key)).map(str::to_owned).collect()
    };
    let (alerts, runbooks) = (values("- alert: "), values("runbook: "));
    assert!(alerts.len() >= 11 && alerts.len() == runbooks.len(), "{alerts:?} {runbooks:?}");
    let tests = text("prometheus/idem.test.yml");
    for (alert, runbook) in alerts.iter().zip(&runbooks) {
        let page = text(&format!("prometheus/{runbook}"));
        assert!(page.starts_with(&format!("# {alert}\n")), "{runbook} is not about {alert}");
        for heading in ["Meaning", "Impact", "First look", "Repair", "Prevent"] {
            assert!(page.contains(&format!("\n## {heading}\n")), "{runbook} does not have {heading}");
        }
        for command in page.lines().filter(|line| line.starts_with("idem resolve ")) {
            assert!(command.contains(" --seen VERSION "), "{runbook} resolves what may have changed: {command}");
        }
        let begin = format!("alertname: {alert}\n");
        let mut cases = tests.split(&begin).skip(1).map(|case| case.lines().next().unwrap());
        assert!(cases.clone().any(|case| case.ends_with("exp_alerts: []")), "no test that {alert} is silent");
        assert!(cases.any(|case| case.ends_with("exp_alerts:")), "no test that {alert} fires");
    }
    let pages = ops("runbooks").read_dir().unwrap();
    let pages: BTreeSet<String> =
        pages.map(|page| format!("../runbooks/{}", page.unwrap().file_name().to_str().unwrap())).collect();
    assert_eq!(pages, runbooks.into_iter().collect(), "a page without an alert");
}

/// The words of PromQL and the labels in the expressions; all others must be metrics.
const WORDS: [&str; 29] = [
    "and",
    "answer",
    "avg_over_time",
    "by",
    "count",
    "engine",
    "event",
    "group_left",
    "histogram_quantile",
    "ignoring",
    "increase",
    "instance",
    "job",
    "last_over_time",
    "le",
    "max",
    "offset",
    "on",
    "operation",
    "or",
    "outbox",
    "outcome",
    "rate",
    "state",
    "store",
    "subscriber",
    "sum",
    "time",
    "unless",
];

#[test]
fn expressions_name_metrics_and_label_values_that_exist() {
    let recorder = Arc::new(Described::default());
    let _ = MetricsObserver::with_recorder(recorder.clone());
    let mut metrics = recorder.0.lock().unwrap().clone();
    // Of redis_exporter.
    metrics.insert("redis_evicted_keys_total".to_owned());
    let failed = StoreError::new(StoreErrorKind::Unavailable, "away");
    let kinds = [
        EventKind::Replayed(ReplayKind::Completed),
        EventKind::Replayed(ReplayKind::Failed),
        EventKind::Replayed(ReplayKind::OutcomeUnknown),
        EventKind::Tombstone,
        EventKind::InProgress,
        EventKind::Mismatch,
        EventKind::SettlementLost,
        EventKind::FailedOpen,
        EventKind::StepsNotUndone(&[]),
        EventKind::StoreFailed(&failed),
        EventKind::StoreUnavailable(&failed),
        EventKind::Busy(&failed),
        EventKind::CommitUnclear(&failed),
    ];
    let mut values: BTreeSet<&str> =
        kinds.iter().map(EventKind::name).chain(StateName::ALL.map(StateName::as_str)).collect();
    // Records in progress without a lease are counted on their own.
    values.extend([".+", "abandoned", "idem-redis"]);
    let config = format!("rule_files: ['{}']", ops("prometheus/idem.rules.yml").display());
    let prometheus = Prometheus::start(&config).unwrap_or_else(|error| panic!("{error}"));
    let rules = rules(prometheus.address());
    metrics.extend(rules.iter().filter(|rule| rule["type"] == "recording").map(name));
    let mut expressions = dashboard();
    expressions.extend(rules.iter().map(|rule| rule["query"].as_str().unwrap().to_owned()));
    for expression in &expressions {
        // Text between quotes is a label's value.
        for (number, part) in expression.split('"').enumerate() {
            if number % 2 == 1 {
                let unknown: Vec<_> = part.split('|').filter(|value| !values.contains(value)).collect();
                assert_eq!(unknown, [""; 0], "{expression}");
                continue;
            }
            let words = part.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_' && letter != ':');
            for word in words.filter(|word| word.starts_with(|first: char| first.is_ascii_alphabetic())) {
                let metric = word.strip_suffix("_bucket").unwrap_or(word);
                assert!(metrics.contains(metric) || WORDS.contains(&word), "{word} is no metric: {expression}");
            }
        }
    }
}

/// The names of the metrics that were described.
#[derive(Default)]
struct Described(Mutex<BTreeSet<String>>);

impl Described {
    fn add(&self, name: &KeyName) {
        self.0.lock().unwrap().insert(name.as_str().to_owned());
    }
}

impl Recorder for Described {
    fn describe_counter(&self, name: KeyName, _: Option<Unit>, _: SharedString) {
        self.add(&name);
    }

    fn describe_gauge(&self, name: KeyName, _: Option<Unit>, _: SharedString) {
        self.add(&name);
    }

    fn describe_histogram(&self, name: KeyName, _: Option<Unit>, _: SharedString) {
        self.add(&name);
    }

    fn register_counter(&self, _: &Key, _: &Metadata<'_>) -> Counter {
        Counter::noop()
    }

    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

#[test]
fn the_dashboard_adds_up_no_engines_that_count_together_and_keeps_jobs_apart() {
    for expression in dashboard() {
        for shared in ["idem_running", "idem_settling"] {
            let is_added = expression.contains(&format!("sum by (job) ({shared}"));
            assert!(!is_added, "engines that are attached count this together: {expression}");
        }
        if let Some((_, labels)) = expression.split_once("max by (") {
            assert!(labels.starts_with("job,"), "stores of several jobs may have one name: {expression}");
        }
    }
}

#[test]
fn each_expression_returns_data_of_the_service() {
    let arguments = ["--lease-ms", "1000", "--count-every-ms", "300"];
    let mut server = Server::start_on(Backend::Hybrid, Contract::AtMostOnce, &arguments);
    // A process that dies leaves an unknown outcome.
    let lost = Request::pay("lost").simulate("delay-before=60000").begin(server.address);
    server.await_running();
    server.kill();
    drop(lost);
    server.start_again();
    eventually("an unknown outcome", || (server.send(&Request::pay("lost")).status == 504).then_some(()));
    let messages = serve(page_of_messages());
    let config = format!(
        r#"
global: {{ scrape_interval: 250ms, scrape_timeout: 250ms, evaluation_interval: 500ms }}
rule_files: ['{rules}']
scrape_configs:
  - {{ job_name: payments, authorization: {{ credentials: {OPERATOR} }}, static_configs: [{{ targets: ['{payments}'] }}] }}
  - {{ job_name: messages, static_configs: [{{ targets: ['{messages}'] }}] }}
  - {{ job_name: idem-redis, static_configs: [{{ targets: ['{messages}'] }}] }}
"#,
        rules = ops("prometheus/idem.rules.yml").display(),
        payments = server.address,
    );
    let prometheus = Prometheus::start(&config).unwrap_or_else(|error| panic!("{error}"));
    let prometheus = prometheus.address();
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            (0..).take_while(|_| !is_over.load(Ordering::Relaxed)).for_each(|round| ask(&server, round));
        });
        // The load ends also if an assertion fails.
        let _end = Ends(&is_over);
        let mut expressions = dashboard();
        expressions.extend(rules(prometheus).iter().filter(|rule| rule["type"] == "recording").map(name));
        assert!(expressions.len() > 25, "{expressions:?}");
        for expression in &expressions {
            eventually(expression, || has_data(prometheus, expression).then_some(()));
        }
        for outcome in
            ["executed", "replayed", "replayed-failure", "in-progress", "mismatch", "key-missing", "outcome-unknown"]
        {
            let seen = format!("idem_requests_total{{outcome=\"{outcome}\"}}");
            eventually(outcome, || has_data(prometheus, &seen).then_some(()));
        }
        // Those that wait for no time.
        let expected = BTreeSet::from(["IdemOutcomeUnknown".to_owned(), "IdemParked".to_owned()]);
        eventually("alerts", || (firing(prometheus) == expected).then_some(()));
    });
    for rule in rules(prometheus) {
        assert_eq!((&rule["health"], &rule["lastError"]), (&Value::from("ok"), &Value::Null), "{rule:#}");
    }
}

/// Ends the load when it is dropped.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// One request of each kind.
fn ask(server: &Server, round: u32) {
    let own = Request::pay(&format!("own-{round}"));
    for request in [&own, &own, &own.clone().body("{}"), &Request::keyless(), &Request::pay("lost")] {
        let _ = server.send(request);
    }
    let failing = Request::pay(&format!("failing-{round}")).simulate("status-before=503");
    for _ in 0..2 {
        let _ = server.send(&failing);
    }
    let shared = Request::pay(&format!("shared-{round}")).simulate("delay-before=50");
    thread::scope(|scope| {
        for request in [shared.clone(), shared.clone(), shared.waiting()] {
            scope.spawn(move || server.send(&request));
        }
    });
}

/// What the service does not have: an inbox, an outbox, an audit, and redis_exporter.
fn page_of_messages() -> String {
    let recorder = Arc::new(PrometheusBuilder::new().build_recorder());
    InboxGauges::with_recorder(recorder.clone(), "billing").record(2);
    OutboxGauges::with_recorder(recorder.clone(), "orders").record(3, Duration::from_secs(2));
    AuditCounters::with_recorder(recorder.clone(), "payments").record(4, 0);
    recorder.handle().render() + "redis_evicted_keys_total 0\n"
}

/// Serves a page to each request.
fn serve(page: String) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let head = BufReader::new(&stream).lines().map_while(Result::ok);
            head.take_while(|line| !line.is_empty()).for_each(drop);
            let _ = write!(
                stream,
                "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nConnection: close\r\n\r\n{page}"
            );
        }
    });
    address
}

/// The expressions of the dashboard, for all jobs.
fn dashboard() -> Vec<String> {
    let dashboard: Value = serde_json::from_str(&text("grafana/idem.json")).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let targets = panels.iter().filter_map(|panel| panel["targets"].as_array()).flatten();
    targets.map(|target| target["expr"].as_str().unwrap().replace("$job", ".+")).collect()
}

fn get(prometheus: SocketAddr, target: &str) -> Value {
    let answer = Request::get(target).send(prometheus);
    assert_eq!(answer.status, 200, "{target}: {answer:?}");
    answer.json()["data"].clone()
}

/// The rules that Prometheus has loaded.
fn rules(prometheus: SocketAddr) -> Vec<Value> {
    let groups = get(prometheus, "/api/v1/rules");
    let groups = groups["groups"].as_array().unwrap();
    groups.iter().flat_map(|group| group["rules"].as_array().unwrap()).cloned().collect()
}

fn name(rule: &Value) -> String {
    rule["name"].as_str().unwrap().to_owned()
}

/// Whether an expression returns a number now.
fn has_data(prometheus: SocketAddr, expression: &str) -> bool {
    let encoded: String = expression.bytes().map(|byte| format!("%{byte:02X}")).collect();
    let data = get(prometheus, &format!("/api/v1/query?query={encoded}"));
    let samples = data["result"].as_array().unwrap();
    samples.iter().any(|sample| sample["value"][1].as_str().unwrap().parse().is_ok_and(f64::is_finite))
}

/// The names of the alerts that fire.
fn firing(prometheus: SocketAddr) -> BTreeSet<String> {
    let alerts = get(prometheus, "/api/v1/alerts");
    let alerts = alerts["alerts"].as_array().unwrap().iter().filter(|alert| alert["state"] == "firing");
    alerts.map(|alert| alert["labels"]["alertname"].as_str().unwrap().to_owned()).collect()
}
