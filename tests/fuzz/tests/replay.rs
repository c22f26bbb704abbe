//! Runs the committed corpora, and some thousand inputs derived from them, through all code that reads outside input.
#![expect(clippy::unwrap_used, reason = "a test says what it expects by failing")]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use idem_fuzz_oracles::{Choices, TARGETS, Target};

/// The number of derived inputs for each target.
const MADE: usize = 2_000;

/// The longest derived input, in bytes.
const LONGEST: usize = 4_096;

/// Runs one test at a time: the memory of another test would count for an input.
fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn fuzz() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz")
}

fn names_in(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn corpus(target: &Target) -> Vec<(String, Vec<u8>)> {
    let folder = fuzz().join("corpus").join(target.name);
    let read = |name: String| (name.clone(), fs::read(folder.join(name)).unwrap());
    names_in(&folder).into_iter().map(read).collect()
}

/// Tries an input, and prints it if it fails, so that it can be added to the corpus.
fn try_input(target: &Target, name: &str, input: &[u8]) {
    let tried = std::panic::catch_unwind(|| target.try_input(input));
    assert!(tried.is_ok(), "{} fails for {name}: b\"{}\"", target.name, input.escape_ascii());
}

#[test]
fn every_target_has_a_shell_and_a_corpus() {
    let names: Vec<String> = TARGETS.iter().map(|target| target.name.to_owned()).collect();
    let shells: Vec<String> = names.iter().map(|name| format!("{name}.rs")).collect();
    assert_eq!(names_in(&fuzz().join("corpus")), names);
    assert_eq!(names_in(&fuzz().join("fuzz_targets")), shells);
}

#[test]
fn nothing_in_the_corpora_fails() {
    let _alone = alone();
    for target in TARGETS {
        let corpus = corpus(target);
        assert!(corpus.len() >= 10, "the corpus of {} is lost", target.name);
        corpus.iter().for_each(|(name, input)| try_input(target, name, input));
        println!("{}: {} inputs", target.name, corpus.len());
    }
}

#[test]
fn nothing_that_is_made_of_the_corpora_fails() {
    let _alone = alone();
    for target in TARGETS {
        let corpus: Vec<Vec<u8>> = corpus(target).into_iter().map(|(_, input)| input).collect();
        let mut choices = Choices::of(target.name.as_bytes());
        for at in 0..MADE {
            try_input(target, &format!("made input {at}"), &made(&corpus, &mut choices));
        }
    }
}

/// An input of the corpus with random changes.
fn made(corpus: &[Vec<u8>], choices: &mut Choices) -> Vec<u8> {
    let mut input = choices.one_of(corpus).cloned().unwrap_or_default();
    for _ in 0..=choices.below(4) {
        let at = choices.below(input.len() + 1);
        let end = at + choices.below(input.len() + 1 - at).min(8);
        let byte = choices.number().to_le_bytes()[0];
        match choices.below(6) {
            0 => input.truncate(at),
            1 => drop(input.drain(at..end)),
            2 => input.insert(at, byte),
            3 => input[at..end].fill(byte),
            4 => input.extend_from_within(at..end),
            _ => {
                let other = choices.one_of(corpus).cloned().unwrap_or_default();
                let from = choices.below(other.len() + 1);
                input.splice(at..end, other[from..].iter().copied());
            }
        }
    }
    input.truncate(LONGEST);
    input
}
