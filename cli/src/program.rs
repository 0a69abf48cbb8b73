//! A program whose subcommands are experiments and the like: parsing, error output and exit code.

use std::any::TypeId;
use std::io::Write;
use std::process::{ExitCode, exit};
use std::time::Duration;

use clap::error::{ContextKind, ContextValue};
use clap::{Arg, Command, CommandFactory, FromArgMatches};
use launch::{check_threads, worker_guard};

use crate::error::{Error, Result};
use crate::{help, interrupt, option_values, recipe};

/// Returns the clap command of a program with all subcommands: option names also accept underscores, as in PyTorch's
/// programs; a negative number is an option's value, which its parser refuses, and no unknown option; and `--recipe` is
/// added.
pub fn commands<P: CommandFactory>() -> Command {
    let alias = |option: Arg| match option.get_long().map(|long| long.replace('-', "_")) {
        Some(name) if Some(&*name) != option.get_long() => {
            let is_known = option.get_all_aliases().is_some_and(|known| known.contains(&&*name));
            // Leaked: a few names, once per process.
            if is_known { option } else { option.alias(&*name.leak()) }
        }
        _ => option,
    };
    let numbers = |option: Arg| match takes_number(&option) {
        true => option.allow_negative_numbers(true),
        false => option,
    };
    P::command().mut_subcommands(|command| {
        // Arguments after `launch`'s program name belong to that program; `completions` and `man` take no recipe.
        let command = match command.get_name() {
            "launch" | "completions" | "man" => command,
            _ => recipe::with_option(command),
        };
        help::with_pages(command.mut_args(|option| numbers(alias(option))))
    })
}

fn takes_number(option: &Arg) -> bool {
    let value = option.get_value_parser().type_id();
    let numbers = [
        TypeId::of::<usize>(),
        TypeId::of::<u64>(),
        TypeId::of::<u16>(),
        TypeId::of::<f64>(),
        TypeId::of::<Duration>(),
    ];
    numbers.into_iter().any(|number| value == number)
}

/// Parses this process's arguments, with the options of `--recipe` merged in.
///
/// # Errors
/// A recipe that cannot be used. On an error in the command line itself, the process exits here.
fn parse<P: CommandFactory + FromArgMatches>() -> Result<P> {
    let commands = commands::<P>();
    let arguments = recipe::expand(&commands, std::env::args_os().collect())?;
    let is_short = arguments.iter().skip(1).take_while(|word| *word != "--").any(|word| word == "-h");
    let mut commands = if is_short { commands.mut_subcommands(help::short) } else { commands };
    let parsed = commands.try_get_matches_from_mut(arguments).and_then(|found| {
        option_values::store(&commands, &found);
        P::from_arg_matches(&found)
    });
    parsed.map_err(|error| recipe::recipe_error(&error).unwrap_or_else(|| print_and_exit(error)))
}

/// Prints the parser's message (an error or the help) and exits the process; returns an error only if printing fails.
fn print_and_exit(mut error: clap::Error) -> Error {
    // clap knows an option under both spellings; only the one with hyphens is documented.
    if let Some(ContextValue::String(name)) = error.get(ContextKind::SuggestedArg) {
        let name = ContextValue::String(name.replace('_', "-"));
        error.insert(ContextKind::SuggestedArg, name);
    }
    match error.print() {
        Ok(()) => exit(error.exit_code()),
        Err(error) => Error::Output(error),
    }
}

/// Setup that every process needs before parsing: the worker guard and signal handlers.
fn init_process() -> Result<()> {
    worker_guard()?;
    check_threads()?;
    interrupt::install_handlers()
}

/// Runs a program: parses the arguments, runs the command with `run`, and prints a failure to standard error in one line.
pub fn main<P: CommandFactory + FromArgMatches>(run: impl FnOnce(P) -> Result<()>) -> ExitCode {
    let result = init_process().and_then(|()| run(parse()?));
    let Err(error) = result else { return ExitCode::SUCCESS };
    if let Some(message) = error.message() {
        // If standard error is closed, the exit code is all that is left.
        let _ = writeln!(std::io::stderr().lock(), "{message}");
    }
    ExitCode::from(error.exit_code())
}
