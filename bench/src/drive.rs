//! Clients in this process: each repeats one operation until the time is over.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use tokio::task::JoinSet;

use crate::contest::{Contestant, Sample};
use crate::error::Error;

/// One operation of a client.
pub(crate) type Work = Pin<Box<dyn Future<Output = Result<(), Error>> + Send>>;

/// A contestant whose `clients` do `work` for a turn. Each call of `work` gets another number.
pub(crate) fn driven<'a, F>(
    name: &'static str,
    clients: usize,
    turn: Duration,
    numbers: &Arc<AtomicU64>,
    work: F,
) -> Contestant<'a>
where
    F: Fn(u64) -> Work + Clone + Send + 'static,
{
    let numbers = Arc::clone(numbers);
    Contestant::new(name, move |_| drive(clients, turn, Arc::clone(&numbers), work.clone()))
}

async fn drive<F>(clients: usize, turn: Duration, numbers: Arc<AtomicU64>, work: F) -> Result<Sample, Error>
where
    F: Fn(u64) -> Work + Clone + Send + 'static,
{
    let started = Instant::now();
    let end = started + turn;
    let mut running = JoinSet::new();
    for _ in 0..clients {
        let (work, numbers) = (work.clone(), Arc::clone(&numbers));
        running.spawn(async move {
            let mut times = histogram()?;
            let mut before = Instant::now();
            while before < end {
                work(numbers.fetch_add(1, Ordering::Relaxed)).await?;
                let after = Instant::now();
                times.saturating_record(u64::try_from((after - before).as_nanos()).unwrap_or(u64::MAX));
                before = after;
            }
            Ok::<_, Error>(times)
        });
    }
    let mut times = histogram()?;
    while let Some(done) = running.join_next().await {
        times.add(done??)?;
    }
    Ok(sample(&times, started.elapsed()))
}

/// A histogram of nanoseconds, to three digits.
pub(crate) fn histogram() -> Result<Histogram<u64>, Error> {
    Ok(Histogram::new_with_bounds(1, 120_000_000_000, 3)?)
}

pub(crate) fn sample(times: &Histogram<u64>, took: Duration) -> Sample {
    let micros = |quantile| Some(times.value_at_quantile(quantile) as f64 / 1_000.0);
    Sample { per_second: times.len() as f64 / took.as_secs_f64(), p50: micros(0.5), p99: micros(0.99), cpu: None }
}
