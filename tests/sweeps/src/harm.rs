//! What is done to one verb while it is on its way.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use idem_testkit::drop_at_await;

use crate::world::World;
use idem_proxy::{Cut, Cuts, Direction, Ended, Ending, Proxy};

/// Longer than it takes a connection to come back to its pool.
const RETURN: Duration = Duration::from_millis(250);

/// What is done to it.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Harm {
    /// Nothing: its exchange is measured.
    None,
    /// Its future is dropped at this await.
    Drop {
        at: usize,
        /// After all connections have ended, so that it has to make one.
        is_cold: bool,
    },
    /// Its exchange is cut.
    Cut(Cut),
}

/// One time that a verb comes to harm, and what came of it.
#[derive(Debug)]
pub(crate) struct Trial {
    pub(crate) harm: Harm,
    /// The number of the trial. Those with an even one let another client ask first.
    pub(crate) turn: usize,
    /// Which of the servers' proxies cuts.
    proxy: Option<Arc<Proxy<Cuts>>>,
    met: AtomicUsize,
    carried: [AtomicUsize; 2],
}

/// What a caller was told; nothing, if it did not wait for it.
pub(crate) type Told<T, E> = Option<Result<T, E>>;

impl Trial {
    pub(crate) fn new(harm: Harm, turn: usize, proxy: Option<Arc<Proxy<Cuts>>>) -> Self {
        Self { harm, turn, proxy, met: AtomicUsize::new(0), carried: Default::default() }
    }

    /// Whether the harm was done: it was not if the verb was over before.
    pub(crate) fn is_met(&self) -> bool {
        self.met.load(Ordering::Relaxed) > 0
    }

    /// How many bytes the exchange had in a direction, until its cut if it had one.
    pub(crate) fn carried(&self, direction: Direction) -> usize {
        self.carried[direction as usize].load(Ordering::Relaxed)
    }

    /// Whether the server falls silent.
    pub(crate) fn is_silent(&self) -> bool {
        matches!(self.harm, Harm::Cut(Cut { ending: Ending::Silence, .. }))
    }

    /// Lets a verb come to harm. Before it and after it nothing is on its way.
    pub(crate) async fn harm<T, E>(&self, world: &World, verb: impl Future<Output = Result<T, E>>) -> Told<T, E> {
        world.quiet().await;
        if self.is_silent() {
            // A connection that comes back to its pool is asked whether it is alive, and its place is taken for as long as that
            // takes: the silence is to befall the verb.
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
