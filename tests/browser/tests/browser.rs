//! A headless Chromium opens the example's page, and renders the diagrams of the pages.
#![expect(clippy::expect_used, clippy::unwrap_used, reason = "a test says what it expects by failing")]

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use idem_pages::{markdown_files, workspace};
use tempfile::TempDir;

/// Runs Chromium on a URL with a new profile, and returns what it prints.
fn chromium(url: &str, arguments: &[&str]) -> String {
    let profile = TempDir::new().unwrap();
    let mut command = Command::new("chromium");
    // The page's time runs until its requests and its timers are done. Root needs `--no-sandbox`.
    command.args(["--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000"]);
    command.arg(format!("--user-data-dir={}", profile.path().display()));
    let output = command.args(arguments).arg(url).output().expect("chromium; install Debian's package chromium");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// The example with its databases in a new folder.
struct Payments {
    process: Child,
    url: String,
    folder: TempDir,
}

impl Payments {
    fn start(arguments: &[&str]) -> Self {
        let folder = TempDir::new().unwrap();
        let program = built("payments");
        let mut command = Command::new(&program);
        let settings = std::env::vars_os().map(|(name, _)| name);
        settings.filter(|name| name.to_string_lossy().starts_with("PAYMENTS_")).for_each(|name| {
            command.env_remove(name);
        });
        command.args(["--listen", "127.0.0.1:0"]).args(arguments).current_dir(folder.path()).stdout(Stdio::piped());
        let mut process = command.spawn().unwrap_or_else(|error| panic!("{}: {error}", program.display()));
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let url = line.trim().strip_prefix("listening on ").unwrap().to_owned();
        Self { process, url, folder }
    }
}

/// A program that `cargo xtask test-browser` has built, in the folder above this one.
fn built(name: &str) -> PathBuf {
    std::env::current_exe().unwrap().parent().unwrap().with_file_name(name)
}

/// Takes a picture of a page, and returns it.
fn screenshot(url: &str, name: &str, arguments: &[&str]) -> Vec<u8> {
    let picture = workspace().join("target/browser").join(name);
    std::fs::create_dir_all(picture.parent().unwrap()).unwrap();
    let screenshot = format!("--screenshot={}", picture.display());
    chromium(url, &[arguments, &[&screenshot]].concat());
    let picture = std::fs::read(picture).unwrap();
    // A PNG with something on it.
    assert!(picture.starts_with(b"\x89PNG") && picture.len() > 10_000, "{} bytes", picture.len());
    picture
}

impl Drop for Payments {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The text of the cells of a table row by row, from serialised HTML.
fn cells(page: &str, table: &str) -> Vec<String> {
    let table = page.split_once(&format!("id=\"{table}\">")).unwrap().1;
    let table = table.split_once("</tbody>").map_or(table, |(table, _)| table);
    let cells = table.split("<td").skip(1).map(|cell| {
        let cell = cell.split_once('>').unwrap().1.split_once("</td>").unwrap().0;
        cell.replace("<code>", "").replace("</code>", "")
    });
    cells.collect()
}

#[test]
fn a_payment_whose_answer_was_lost_is_made_once() {
    let payments = Payments::start(&[]);
    let page = chromium(&format!("{}/#story", payments.url), &["--dump-dom"]);
    assert!(page.contains("<title>told</title>"), "{page}");
    let log = cells(&page, "log");
    let rows: Vec<_> = log.chunks(3).map(|row| (row[0].as_str(), row[1].as_str())).collect();
    assert_eq!(
        rows,
        [
            ("POST, 12.50 EUR", "lost on the way"),
            ("POST, 12.50 EUR", "201, replayed"),
            ("POST, 12.50 EUR", "201, replayed"),
            ("POST, 99.99 EUR", "422: Idempotency key used for another request"),
        ]
    );
    assert_eq!(log[5], log[8], "both replays name one payment");
    assert_eq!(cells(&page, "record"), ["attempt", "1", "state", "completed", "status", "201"]);
    for (id, text) in [("effects", "1"), ("payments", "payment"), ("total", "12.50")] {
        assert!(page.contains(&format!("id=\"{id}\">{text}<")), "{id}: {page}");
    }
    screenshot(&format!("{}/#story", payments.url), "payments.png", &["--window-size=1000,760"]);
}

/// `idem` on the store of a killed service.
struct Operator {
    store: String,
}

impl Operator {
    fn of(folder: &Path) -> Self {
        Self { store: format!("sqlite://{}", folder.join("payments.db").display()) }
    }

    fn run(&self, arguments: &[&str]) -> String {
        let ran = Command::new(built("idem")).args(["--store", &self.store]).args(arguments).output().unwrap();
        assert!(ran.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&ran.stderr));
        String::from_utf8(ran.stdout).unwrap()
    }

    /// `idem console`, and the URL that it prints.
    fn console(&self) -> (Running, String) {
        let mut command = Command::new(built("idem"));
        let mut process = command.args(["--store", &self.store, "console"]).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        (Running(process), line.trim().to_owned())
    }
}

/// A process that ends with the value.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn the_console_shows_a_stuck_key_in_light_and_dark() {
    let mut payments = Payments::start(&["--contract", "at-most-once", "--simulate", "--lease-ms", "1000"]);
    let address = payments.url.strip_prefix("http://").unwrap();
    let body = r#"{"amount": 1250, "currency": "EUR", "recipient": "alice"}"#;
    let mut stream = TcpStream::connect(address).unwrap();
    let head = format!(
        "POST /v1/payments HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer acme\r\nIdempotency-Key: stuck"
    );
    let length = body.len();
    write!(stream, "{head}\r\nContent-Type: application/json\r\nX-Simulate: delay-after=60000\r\nContent-Length: {length}\r\n\r\n{body}").unwrap();
    let operator = Operator::of(payments.folder.path());
    let deadline = Instant::now() + Duration::from_secs(60);
    let found = |state: &[&str]| {
        loop {
            let listed = operator.run(&[&["--json", "list"], state].concat());
            if let Some(line) = listed.lines().next() {
                return line.to_owned();
            }
            assert!(Instant::now() < deadline, "no record: {state:?}");
        }
    };
    found(&["--state", "in-progress"]);
    payments.process.kill().unwrap();
    let record = found(&["--abandoned"]);
    let id = record.split_once("\"id\":\"").unwrap().1.split_once('"').unwrap().0;
    let (_console, url) = operator.console();
    let overview = chromium(&url, &["--dump-dom"]);
    assert!(overview.contains(id) && overview.contains("abandoned") && overview.contains("acme"), "{overview}");
    let page = format!("{url}/records/{id}");
    let shown = chromium(&page, &["--dump-dom"]);
    for part in ["it is not known whether the operation took effect", "Timeline", "How did it end?"] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    for (name, url) in [("overview", &url), ("record", &page)] {
        let [dark, light] = ["dark", "light"].map(|scheme| {
            let preferred = format!("--blink-settings=preferredColorScheme={}", u8::from(scheme == "light"));
            screenshot(url, &format!("console-{name}-{scheme}.png"), &[&preferred, "--window-size=1100,1200"])
        });
        assert_ne!(dark, light, "{name}: the page follows the scheme that the user prefers");
    }
}

#[test]
fn every_diagram_is_one_to_mermaid() {
    let script = std::env::var("MERMAID_JS").expect("MERMAID_JS: run `cargo xtask test-browser`");
    let mut diagrams = Vec::new();
    for (page, text) in markdown_files() {
        let blocks = text.split("```mermaid\n").skip(1).map(|block| block.split_once("```").unwrap().0.to_owned());
        diagrams.extend(blocks.map(|block| (page.display().to_string(), block)));
    }
    assert!(diagrams.len() >= 6, "{} diagrams: some were not found", diagrams.len());
    let folder = TempDir::new().unwrap();
    let escaped = |text: &str| text.replace('&', "&amp;").replace('<', "&lt;");
    // One that is wrong on purpose, so that this test can fail.
    let wrong = "sequenceDiagram\n    Client->>\n";
    let all = diagrams.iter().map(|(_, block)| block.as_str()).chain([wrong]);
    let blocks: String = all.map(|block| format!("<pre class=\"source\">{}</pre>", escaped(block))).collect();
    let html = format!(
        "<!doctype html><meta charset=utf-8><script src=\"file://{script}\"></script>{blocks}<ol id=results></ol><script>
        mermaid.initialize({{ startOnLoad: false }});
        (async () => {{
            const sources = [...document.querySelectorAll('pre.source')];
            for (const [number, source] of sources.entries()) {{
                const item = document.createElement('li');
                try {{
                    const {{ svg }} = await mermaid.render('diagram' + number, source.textContent);
                    item.textContent = svg.includes('aria-roledescription=\"error\"') ? 'error' : 'rendered';
                }} catch (error) {{
                    item.textContent = 'error: ' + error.message;
                }}
                document.getElementById('results').append(item);
            }}
            document.title = 'done';
        }})();
        </script>"
    );
    let file = folder.path().join("diagrams.html");
    std::fs::write(&file, html).unwrap();
    let page = chromium(&format!("file://{}", file.display()), &["--dump-dom", "--allow-file-access-from-files"]);
    assert!(page.contains("<title>done</title>"), "{page}");
    let results = page.split_once("id=\"results\">").unwrap().1;
    let results: Vec<_> =
        results.split("<li>").skip(1).map(|item| item.split_once("</li>").unwrap().0.to_owned()).collect();
    assert_eq!(results.len(), diagrams.len() + 1);
    for (result, (page, block)) in results.iter().zip(&diagrams) {
        assert_eq!(result, "rendered", "{page}:\n{block}");
    }
    assert!(results.last().unwrap().starts_with("error"), "{results:?}");
    println!("{} diagrams rendered", diagrams.len());
}
