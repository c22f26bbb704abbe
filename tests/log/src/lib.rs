//! What all tests of one process log.
#![expect(clippy::unwrap_used, reason = "a test says what it expects by failing")]

use std::io;
use std::sync::{Arc, Mutex, OnceLock};

use tracing_subscriber::fmt::MakeWriter;

/// What all tests of this process have logged since the first of them asked for it.
#[derive(Debug, Clone, Default)]
pub struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    /// What this project logs, for the whole process: other tests run the same code, and what they found out about its spans
    /// would stay.
    ///
    /// # Panics
    /// If something else has set a subscriber for the process.
    pub fn of_process() -> &'static Self {
        static LOG: OnceLock<Log> = OnceLock::new();
        LOG.get_or_init(|| {
            let log = Log::default();
            let subscriber = tracing_subscriber::fmt().with_env_filter("idem=debug").with_ansi(false);
            tracing::subscriber::set_global_default(subscriber.with_writer(log.clone()).finish()).unwrap();
            tracing::callsite::rebuild_interest_cache();
            log
        })
    }

    /// The lines that contain all of `parts`.
    ///
    /// # Panics
    /// If the log is not UTF-8.
    #[must_use]
    pub fn lines(&self, parts: &[&str]) -> Vec<String> {
        let log = String::from_utf8(self.0.lock().unwrap().clone()).unwrap();
        log.lines().filter(|line| parts.iter().all(|part| line.contains(part))).map(str::to_owned).collect()
    }
}

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for Log {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        self.clone()
    }
}
