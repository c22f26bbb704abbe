//! The ways in which a request is sent.

use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Request, Response, StatusCode, header};
use idem_core::OwnerToken;
use idem_core::engine::Contract;
use tokio::task::JoinHandle;

use super::broken::Broken;
use super::process::{Answered, Process};
use super::trial::{Requests, Trial};
use crate::faults::{Fault, Faults, Verb};

/// How many requests are sent at once.
const AT_ONCE: usize = 8;

/// How long to wait for what must come, and the pause between two checks.
const PATIENCE: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_millis(10);

/// How long a settlement is held back for a client to disconnect meanwhile.
const HELD_BACK: Duration = Duration::from_millis(200);

/// Longer than a trial takes.
const NEVER: Duration = Duration::from_secs(3_600);

/// The verbs that ask for the right to run, and those that end a run.
const ASKING: [Verb; 2] = [Verb::Acquire, Verb::Begin];
const ENDING: [Verb; 2] = [Verb::Settle, Verb::Finish];

type Answer = Result<Response<Bytes>, Broken>;

impl Trial {
    /// Tries it.
    ///
    /// Needs a tokio runtime with time.
    ///
    /// # Errors
    /// The first promise that does not hold.
    ///
    /// # Panics
    /// When the service does not start.
    pub async fn check(&self) -> Result<(), Broken> {
        self.twice().await?;
        self.at_once().await?;
        self.disconnected().await?;
        self.refuses().await?;
        self.crashed_before_it_ran().await?;
        self.crashed_before_it_was_recorded().await?;
        self.crashed_after_it_was_recorded().await
    }

    async fn twice(&self) -> Result<(), Broken> {
        let (process, key, before) = (self.process().await, key(), self.effects().await);
        let first = self.answer(&process, &key).await?;
        if !is_success(&first) {
            return Err(Broken::FirstRequestFailed(first.status()));
        }
        match self.effects_since(before).await {
            0 => return Err(Broken::AnsweredTooEarly),
            1 => {}
            many => return Err(Broken::ManyEffects(many)),
        }
        let repeat = self.answer(&process, &key).await?;
        if self.effects_since(before).await > 1 {
            return Err(Broken::RepeatRan);
        }
        self.expect_same(&first, &repeat)?;
        let other = self.process().await;
        let repeat = self.answer(&other, &key).await?;
        if calls(&other.faults, ENDING) > 0 || self.effects_since(before).await > 1 {
            return Err(Broken::OtherProcessRan);
        }
        self.expect_same(&first, &repeat)
    }

    async fn at_once(&self) -> Result<(), Broken> {
        let (process, key, before) = (self.process().await, key(), self.effects().await);
        let sent: Vec<_> = (0..AT_ONCE).map(|_| process.send(self.keyed(&self.request, &key))).collect();
        let mut answers = Vec::new();
        for sent in sent {
            answers.push(self.answered(sent).await?);
        }
        let first = self.answer(&process, &key).await?;
        match self.effects_since(before).await {
            0 => return Err(Broken::AnsweredTooEarly),
            1 => {}
            _ => return Err(Broken::RanAtOnce(AT_ONCE)),
        }
        answers.iter().filter(|answer| !asks_to_repeat(answer)).try_for_each(|answer| self.expect_same(&first, answer))
    }

    async fn disconnected(&self) -> Result<(), Broken> {
        let (process, key, before) = (self.process().await, key(), self.effects().await);
        ENDING.into_iter().for_each(|verb| process.faults.next(verb, Fault::Delay(HELD_BACK)));
        let sent = process.send(self.keyed(&self.request, &key));
        self.until(|| sent.is_finished() || process.faults.fired() > 0).await;
        sent.abort();
        let answer = self.answer(&process, &key).await?;
        match self.effects_since(before).await {
            _ if asks_to_repeat(&answer) => Err(Broken::Stuck(answer.status())),
            0 => Err(Broken::LostWithItsClient),
            1 => Ok(()),
            _ => Err(Broken::RanAfterDisconnect),
        }
    }

    async fn refuses(&self) -> Result<(), Broken> {
        let Some(request) = &self.refused else { return Ok(()) };
        let (process, before) = (self.process().await, self.effects().await);
        let answer = self.answered(process.send(self.keyed(request, &key()))).await?;
        match self.effects_since(before).await {
            _ if !answer.status().is_client_error() && !answer.status().is_server_error() => {
                Err(Broken::NotRefused(answer.status()))
            }
            0 => Ok(()),
            _ => Err(Broken::RefusedWithEffect(answer.status())),
        }
    }

    async fn crashed_before_it_ran(&self) -> Result<(), Broken> {
        let (key, before) = (key(), self.effects().await);
        self.crash_at(ASKING, Fault::LostAnswer, &key).await?;
        let answer = self.repeat_after_crash(&key).await?;
        match (self.effects_since(before).await, self.contract) {
            (0, Contract::AtMostOnce) if is_success(&answer) => Err(Broken::SucceededWithoutEffect(answer.status())),
            (0, Contract::AtMostOnce) => Ok(()),
            (effects, _) => self.expect_one_after_crash(effects, &answer),
        }
    }

    async fn crashed_before_it_was_recorded(&self) -> Result<(), Broken> {
        let (key, before) = (key(), self.effects().await);
        self.crash_at(ENDING, Fault::Late(NEVER), &key).await?;
        if self.contract == Contract::Transactional && self.effects_since(before).await > 0 {
            return Err(Broken::WroteOutside);
        }
        let answer = self.repeat_after_crash(&key).await?;
        match (self.effects_since(before).await, self.contract) {
            // The client may hear that the outcome is not known.
            (1, Contract::AtMostOnce) => Ok(()),
            (effects, _) => self.expect_one_after_crash(effects, &answer),
        }
    }

    async fn crashed_after_it_was_recorded(&self) -> Result<(), Broken> {
        let (key, before) = (key(), self.effects().await);
        self.crash_at(ENDING, Fault::LostAnswer, &key).await?;
        let answer = self.repeat_after_crash(&key).await?;
        match self.effects_since(before).await {
            0 => Err(Broken::EffectAfterRecord),
            effects => self.expect_one_after_crash(effects, &answer),
        }
    }

    fn expect_one_after_crash(&self, effects: u64, answer: &Response<Bytes>) -> Result<(), Broken> {
        let contract = self.contract;
        match effects {
            0 => Err(Broken::NotRunAfterCrash { contract, status: answer.status() }),
            1 if is_success(answer) => Ok(()),
            1 => Err(Broken::FailedAfterCrash(answer.status())),
            effects => Err(Broken::RanAgainAfterCrash { effects, contract }),
        }
    }

    /// A process that ends in one of the verbs.
    async fn crash_at(&self, verbs: [Verb; 2], fault: Fault, key: &str) -> Result<(), Broken> {
        let process = self.process().await;
        verbs.into_iter().for_each(|verb| process.faults.next(verb, fault));
        let sent = process.send(self.keyed(&self.request, key));
        self.until(|| sent.is_finished() || process.faults.fired() > 0).await;
        match process.faults.fired() {
            0 if sent.is_finished() => Err(Broken::StoreNotWrapped),
            0 => Err(self.too_late()),
            _ => Ok(()),
        }
    }

    /// The repeat in a new process, after the lease of the one that has ended.
    async fn repeat_after_crash(&self, key: &str) -> Answer {
        if let Some(time) = &self.time {
            time.advance(self.lease);
        }
        let process = self.process().await;
        let answer = self.answer(&process, key).await?;
        if asks_to_repeat(&answer) { Err(Broken::Stuck(answer.status())) } else { Ok(answer) }
    }

    /// The answer to a request, which is repeated while the answer asks for that.
    async fn answer(&self, process: &Process, key: &str) -> Answer {
        let start = Instant::now();
        loop {
            let answer = self.answered(process.send(self.keyed(&self.request, key))).await?;
            if !asks_to_repeat(&answer) || start.elapsed() > self.patience() {
                return Ok(answer);
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    async fn answered(&self, sent: JoinHandle<Answered>) -> Answer {
        match tokio::time::timeout(self.patience(), sent).await {
            Ok(Ok(answered)) => answered.map_err(Broken::NoAnswer),
            Ok(Err(error)) => Err(Broken::NoAnswer(error.to_string())),
            Err(_) => Err(self.too_late()),
        }
    }

    fn too_late(&self) -> Broken {
        Broken::NoAnswer(format!("it took longer than {:?}", self.patience()))
    }

    async fn process(&self) -> Process {
        Process::start(&self.start).await
    }

    async fn effects(&self) -> u64 {
        (self.effects)().await
    }

    async fn effects_since(&self, before: u64) -> u64 {
        self.effects().await.saturating_sub(before)
    }

    fn keyed(&self, request: &Requests, key: &str) -> Request<Bytes> {
        let mut request = request();
        (self.put_key)(&mut request, key);
        request
    }

    fn patience(&self) -> Duration {
        PATIENCE + if self.time.is_some() { Duration::ZERO } else { self.lease }
    }

    async fn until(&self, mut is_so: impl FnMut() -> bool) {
        let start = Instant::now();
        while !is_so() && start.elapsed() < self.patience() {
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Headers may differ, as those of middleware around the layer do, but not the type of the body and where the result is.
    fn expect_same(&self, first: &Response<Bytes>, repeat: &Response<Bytes>) -> Result<(), Broken> {
        let is_same = |name| first.headers().get(&name) == repeat.headers().get(&name);
        let has_same_status = first.status() == repeat.status();
        let is_replay = if self.body_is_kept {
            has_same_status
                && first.body() == repeat.body()
                && is_same(header::CONTENT_TYPE)
                && is_same(header::LOCATION)
        } else {
            has_same_status || repeat.status() == StatusCode::GONE
        };
        if is_replay {
            return Ok(());
        }
        Err(Broken::AnotherAnswer { first: first.status(), repeat: repeat.status() })
    }
}

fn key() -> String {
    OwnerToken::random().as_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn calls(faults: &Faults, verbs: [Verb; 2]) -> u64 {
    verbs.into_iter().map(|verb| faults.calls(verb)).sum()
}

fn is_success(answer: &Response<Bytes>) -> bool {
    answer.status().is_success() || answer.status().is_redirection()
}

/// Whether the client should send the same request later: it runs, rests, was limited, or its store is not there.
fn asks_to_repeat(answer: &Response<Bytes>) -> bool {
    let statuses = [StatusCode::CONFLICT, StatusCode::SERVICE_UNAVAILABLE, StatusCode::TOO_MANY_REQUESTS];
    statuses.contains(&answer.status()) && answer.headers().contains_key(header::RETRY_AFTER)
}
