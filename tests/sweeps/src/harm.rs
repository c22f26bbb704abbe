//! Harms one verb while it runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use idem_testkit::drop_at_await;

use crate::world::World;
use idem_proxy::{Cut, Cuts, Direction, Ended, Ending, Proxy};

/// Longer than a connection takes to return to its pool.
const RETURN: Duration = Duration::from_millis(250);

/// The kinds of harm.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Harm {
    /// None: the exchange is measured.
    None,
    /// Its future is dropped at this await.
    Drop {
        at: usize,
        /// All connections are closed before, so that the verb must connect.
        is_cold: bool,
    },
    /// Its exchange is cut.
    Cut(Cut),
}

/// One verb that comes to harm, and the outcome.
#[derive(Debug)]
pub(crate) struct Trial {
    pub(crate) harm: Harm,
    /// The number of the trial. In even trials, another client asks first.
    pub(crate) turn: usize,
    /// The proxy that cuts.
    proxy: Option<Arc<Proxy<Cuts>>>,
    met: AtomicUsize,
    carried: [AtomicUsize; 2],
}

/// What a caller was answered; `None` if it did not wait.
pub(crate) type Told<T, E> = Option<Result<T, E>>;

impl Trial {
    pub(crate) fn new(harm: Harm, turn: usize, proxy: Option<Arc<Proxy<Cuts>>>) -> Self {
        Self { harm, turn, proxy, met: AtomicUsize::new(0), carried: Default::default() }
    }

    /// Whether the harm was done, which it is not if the verb finished before.
    pub(crate) fn is_met(&self) -> bool {
        self.met.load(Ordering::Relaxed) > 0
    }

    /// The bytes of the exchange in a direction, until its cut if it had one.
    pub(crate) fn carried(&self, direction: Direction) -> usize {
        self.carried[direction as usize].load(Ordering::Relaxed)
    }

    /// Whether the server falls silent.
    pub(crate) fn is_silent(&self) -> bool {
        matches!(self.harm, Harm::Cut(Cut { ending: Ending::Silence, .. }))
    }

    /// Runs a verb and harms it. Before and after, no other traffic is pending.
    pub(crate) async fn harm<T, E>(&self, world: &World, verb: impl Future<Output = Result<T, E>>) -> Told<T, E> {
        world.quiet().await;
        if self.is_silent() {
            // The pool tests a returning connection, which occupies its place meanwhile. Wait for that, so that the silence
            // hits the verb.
            tokio::time::sleep(RETURN).await;
        }
        let told = match (self.harm, &self.proxy) {
            (Harm::Drop { at, is_cold }, _) => {
                if is_cold {
                    world.proxies.iter().for_each(|proxy| proxy.end_all(Ended::Reset));
                }
                let told = drop_at_await(at, verb).await;
                self.met.fetch_add(usize::from(told.is_none()), Ordering::Relaxed);
                told
            }
            (Harm::None | Harm::Cut(_), None) => Some(verb.await),
            (harm, Some(proxy)) => {
                proxy.arm(match harm {
                    Harm::Cut(cut) => Some(cut),
                    _ => None,
                });
                let told = verb.await;
                proxy.quiet().await;
                self.met.fetch_add(usize::from(proxy.disarm()), Ordering::Relaxed);
                for direction in [Direction::Requests, Direction::Answers] {
                    self.carried[direction as usize].store(proxy.carried(direction), Ordering::Relaxed);
                }
                Some(told)
            }
        };
        world.quiet().await;
        told
    }
}
