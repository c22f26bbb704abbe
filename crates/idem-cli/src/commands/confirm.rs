//! What a change wants: a reason, and a yes.

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

/// Refuses a change without a reason.
pub(crate) fn expect_reason(reason: &str) -> Result<(), Box<dyn Error>> {
    match reason.trim().is_empty() {
        true => Err("--reason is empty: say why, for those who look at this later".into()),
        false => Ok(()),
    }
}
