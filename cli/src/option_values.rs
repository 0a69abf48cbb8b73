//! The options of this process, for its report and for the comparison with other ranks.

use std::sync::OnceLock;

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};
use girandole::settings::Setting;
use report::OptionValue;

/// The command of this process, and its options in the order of the help.
static PARSED: OnceLock<(String, Vec<ParsedOption>)> = OnceLock::new();

/// An option after defaults and the recipe.
struct ParsedOption {
    /// As it is typed.
    name: String,
    /// `None` if it was not given and has no default.
    values: Option<Vec<String>>,
    is_switch: bool,
    is_default: bool,
    /// Whether a report shows it.
    is_listed: bool,
    /// A default that depends on other things, which the help describes: `[default: the folder's, else bytes]`.
    described_default: Option<String>,
}

/// Stores the options of the parsed subcommand; called once, as a process parses its command line once.
pub(crate) fn store(program: &Command, found: &ArgMatches) {
    let Some((name, found)) = found.subcommand() else { return };
    let Some(command) = program.find_subcommand(name) else { return };
    let options = command.get_arguments().filter_map(|option| ParsedOption::of(option, found));
    let _ = PARSED.set((name.into(), options.collect()));
}

/// Returns the options of this process for its report, in the order of the help.
pub(crate) fn all() -> Vec<OptionValue> {
    let options = PARSED.get().into_iter().flat_map(|(_, options)| options);
    options.filter(|option| option.is_listed).map(ParsedOption::value).collect()
}

/// Returns the command and the options of this process, to compare them; nothing if it has not parsed them with
/// [`program`](crate::program).
pub(crate) fn settings() -> impl Iterator<Item = Setting> {
    PARSED.get().into_iter().flat_map(|(command, options)| {
        [Setting::new("the command", command)].into_iter().chain(options.iter().map(ParsedOption::setting))
    })
}

impl ParsedOption {
    fn of(option: &Arg, found: &ArgMatches) -> Option<Self> {
        let long = option.get_long().filter(|long| !["help", "version"].contains(long))?;
        let id = option.get_id().as_str();
        let values = found.try_get_raw(id).ok().flatten();
        let help = option.get_help().map(ToString::to_string).unwrap_or_default();
        let described = help.split_once("[default: ").and_then(|(_, rest)| rest.split(']').next());
        Some(Self {
            name: format!("--{long}"),
            values: values.map(|all| all.map(|value| value.to_string_lossy().into_owned()).collect()),
            is_switch: matches!(option.get_action(), ArgAction::SetTrue),
            is_default: found.value_source(id).is_none_or(|source| source == ValueSource::DefaultValue),
            is_listed: id != "recipe" && !option.is_hide_set(),
            described_default: described.map(Into::into),
        })
    }

    fn is_on(&self) -> bool {
        self.values.iter().flatten().any(|value| value == "true")
    }

    fn value(&self) -> OptionValue {
        let value = match &self.values {
            _ if self.is_switch => Some(if self.is_on() { "on" } else { "off" }.to_string()),
            Some(values) => Some(values.join(" ")),
            None => self.described_default.clone(),
        };
        let value = value.unwrap_or_else(|| "–".to_string());
        OptionValue { name: self.name.clone(), value, is_default: self.is_default }
    }

    fn setting(&self) -> Setting {
        match &self.values {
            Some(_) if self.is_switch && self.is_on() => Setting::new(&self.name, ""),
            Some(values) if !self.is_switch => {
                let numbers = values.iter().flat_map(|value| value.split(',')).map(number);
                Setting::new(&self.name, numbers.collect::<Vec<_>>().join(",")).shown_as(values.join(","))
            }
            _ => Setting::absent(&self.name),
        }
    }
}

/// Returns one text for all ways to write a number; any other text as it is.
fn number(text: &str) -> String {
    match (text.parse::<i128>(), text.parse::<f64>()) {
        (Ok(whole), _) => whole.to_string(),
        (_, Ok(number)) => number.to_string(),
        _ => text.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    /// Options of all kinds.
    #[derive(Debug, Parser)]
    struct Program {
        #[arg(long, default_value = "0.01")]
        lr: f64,
        #[arg(long, default_value = "0.9,0.95")]
        betas: String,
        #[arg(long)]
        mesh: Option<String>,
        #[arg(long)]
        reshuffle: bool,
        #[arg(long, value_delimiter = ',', default_value = "a,b")]
        names: Vec<String>,
    }

    /// The options of a command line as they are compared, and as they are shown.
    fn options(words: &[&str]) -> (Vec<Option<String>>, Vec<String>) {
        use clap::CommandFactory;

        let command = Program::command();
        let found = command.clone().try_get_matches_from([&["program"], words].concat()).unwrap();
        let all = command.get_arguments().filter_map(|option| ParsedOption::of(option, &found));
        let all: Vec<Setting> = all.map(|option| option.setting()).collect();
        (all.iter().map(|one| one.value.clone()).collect(), all.iter().map(Setting::to_string).collect())
    }

    #[test]
    fn options_are_compared_by_value_and_shown_as_they_are_typed() {
        let (defaults, shown) = options(&[]);
        assert_eq!(shown, ["--lr 0.01", "--betas 0.9,0.95", "no --mesh", "no --reshuffle", "--names a,b"]);
        let (same, shown) =
            options(&["--lr", "1e-2", "--betas", "0.90,0.95", "--names", "a", "--names", "b"]);
        assert_eq!(same, defaults);
        assert_eq!(shown[..2], ["--lr 1e-2", "--betas 0.90,0.95"]);
        for (place, other) in [
            (0, &["--lr", "0.02"][..]),
            (1, &["--betas=0.9,0.99"]),
            (2, &["--mesh=dp=2"]),
            (3, &["--reshuffle"]),
            (4, &["--names=a"]),
        ] {
            let (other, _) = options(other);
            let differ: Vec<usize> = (0..5).filter(|index| other[*index] != defaults[*index]).collect();
            assert_eq!(differ, [place]);
        }
    }

    #[test]
    fn options_that_were_not_given_have_their_defaults() {
        let steps = Arg::new("steps").long("steps").default_value("10");
        let tokenizer =
            Arg::new("tokenizer").long("tokenizer").help("Tokenizer [default: the folder's, else bytes]");
        let data = Arg::new("data").long("data").num_args(1..);
        let overwrite = Arg::new("overwrite").long("overwrite").action(ArgAction::SetTrue);
        let train =
            Command::new("train").args([steps, tokenizer, data, overwrite, Arg::new("seed").long("seed")]);
        let mut program = Command::new("program").subcommand(train);
        let words = ["program", "train", "--data", "a", "b", "--seed", "7"];
        let found = program.try_get_matches_from_mut(words).unwrap();
        store(&program, &found);
        let all: Vec<_> =
            all().into_iter().map(|option| (option.name, option.value, option.is_default)).collect();
        let expected = [
            ("--steps", "10", true),
            ("--tokenizer", "the folder's, else bytes", true),
            ("--data", "a b", false),
            ("--overwrite", "off", true),
            ("--seed", "7", false),
        ];
        assert_eq!(
            all,
            expected.map(|(name, value, default)| (name.to_string(), value.to_string(), default))
        );
    }
}
