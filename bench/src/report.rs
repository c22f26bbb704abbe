//! The goals, their figures, and everything that was measured.

use std::path::Path;

use serde_json::json;

use crate::contest::{Outcome, Spread};
use crate::error::Error;
use crate::judged::{Goal, Judged};
use crate::pace::Pace;
use crate::{page, plot};

#[derive(Debug)]
pub(crate) struct Report {
    pace: Pace,
    outcomes: Vec<Outcome>,
    goals: Vec<Judged>,
    notes: Vec<String>,
}

impl Report {
    pub(crate) fn new(pace: Pace) -> Self {
        Self { pace, outcomes: Vec::new(), goals: Vec::new(), notes: Vec::new() }
    }

    /// Adds the outcome of a contest.
    pub(crate) fn add(&mut self, outcome: Outcome) {
        self.outcomes.push(outcome);
    }

    /// Judges a goal by its figure.
    pub(crate) fn judge(&mut self, what: &str, goal: Goal, figure: Option<Spread>) {
        let met = figure.is_some_and(|figure| goal.is_met(figure.median));
        self.goals.push(Judged { what: what.to_owned(), goal, figure, met });
    }

    /// Adds what a reader must know in addition to the figures.
    pub(crate) fn note(&mut self, note: String) {
        println!("{note}");
        self.notes.push(note);
    }

    /// Prints the goals, and writes the files. A missed goal is no error: a figure is a measurement.
    pub(crate) fn finish(self, json: Option<&Path>, plots: Option<&Path>, page: Option<&Path>) -> Result<(), Error> {
        if !self.goals.is_empty() {
            self.print_goals();
        }
        if let Some(path) = json {
            let all = json!({
                "rounds": self.pace.rounds, "turn_seconds": self.pace.turn.as_secs_f64(),
                "quick": self.pace.quick, "notes": self.notes, "contests": self.outcomes, "goals": self.goals,
            });
            std::fs::write(path, serde_json::to_vec_pretty(&all)?)?;
        }
        if let Some(folder) = plots {
            std::fs::create_dir_all(folder)?;
            if !self.goals.is_empty() {
                plot::goals(&folder.join("goals.svg"), &self.goals)?;
            }
            for outcome in &self.outcomes {
                plot::contest(folder, outcome)?;
            }
        }
        if let Some(path) = page {
            let renewed = page::renewed(&std::fs::read_to_string(path)?, &self.goals, &self.outcomes)?;
            std::fs::write(path, renewed)?;
        }
        Ok(())
    }

    fn print_goals(&self) {
        println!("\n| goal | wanted | figure | min – max | met |");
        println!("|---|---|---|---|---|");
        for judged in &self.goals {
            println!("{}", judged.row());
        }
        let met = self.goals.iter().filter(|judged| judged.met).count();
        println!("\n{met} of {} goals met", self.goals.len());
    }
}
