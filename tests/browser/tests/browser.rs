//! A headless Chromium opens the example's page, and renders the diagrams of the pages.
#![expect(clippy::expect_used, clippy::unwrap_used, reason = "a test says what it expects by failing")]

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};

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
    _folder: TempDir,
}

impl Payments {
    fn start() -> Self {
        let folder = TempDir::new().unwrap();
        // `cargo xtask test-browser` has built it in the folder above this program.
        let program = std::env::current_exe().unwrap().parent().unwrap().with_file_name("payments");
        let mut command = Command::new(&program);
        let settings = std::env::vars_os().map(|(name, _)| name);
        settings.filter(|name| name.to_string_lossy().starts_with("PAYMENTS_")).for_each(|name| {
            command.env_remove(name);
        });
        command.args(["--listen", "127.0.0.1:0"]).current_dir(folder.path()).stdout(Stdio::piped());
        let mut process = command.spawn().unwrap_or_else(|error| panic!("{}: {error}", program.display()));
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let url = line.trim().strip_prefix("listening on ").unwrap().to_owned();
        Self { process, url, _folder: folder }
    }
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
    let payments = Payments::start();
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
    let picture = workspace().join("target/browser/payments.png");
    std::fs::create_dir_all(picture.parent().unwrap()).unwrap();
    let screenshot = format!("--screenshot={}", picture.display());
    chromium(&format!("{}/#story", payments.url), &[&screenshot, "--window-size=1000,760"]);
    // A PNG with something on it.
    let picture = std::fs::read(picture).unwrap();
    assert!(picture.starts_with(b"\x89PNG") && picture.len() > 10_000, "{} bytes", picture.len());
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
