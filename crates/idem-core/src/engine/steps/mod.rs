//! Steps of an operation that calls several other systems, each with a kept result and an undo.

mod ending;
mod error;
mod log;
mod progress;
mod standing;
mod step;

pub(super) use ending::{Ending, report_steps_that_stay};
pub use error::StepError;
pub(super) use log::CHECKPOINT;
pub use progress::{StepToUndo, Steps};
pub use standing::StandingStep;
pub(super) use standing::{StepsState, is_log};
pub use step::{Step, StepRecord};
