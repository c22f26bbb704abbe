//! The question before a change.

use std::error::Error;
use std::io::IsTerminal as _;

/// Asks on the terminal. Without one, `advice` says what to give instead.
pub(crate) fn confirmed(advice: &str) -> Result<bool, Box<dyn Error>> {
    if !std::io::stdin().is_terminal() {
        return Err(format!("there is no terminal to ask on: {advice}").into());
    }
    eprint!("Type yes to go on: ");
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    Ok(answer.trim() == "yes")
}
