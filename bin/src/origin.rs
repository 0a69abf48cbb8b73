//! Which options of this process come from the file of `--recipe`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::OnceLock;

/// The recipe of this process, where it has one.
static RECIPE: OnceLock<Recipe> = OnceLock::new();

/// The options of a file, and the arguments that they make together with those of the command line.
#[derive(Debug)]
pub(crate) struct Recipe {
    pub(crate) path: PathBuf,
    /// Options that come from the file, by their long names, and their lines.
    pub(crate) options: Vec<(String, usize)>,
    pub(crate) arguments: Vec<OsString>,
}

/// Once: a process parses its command line once.
pub(crate) fn keep(recipe: Recipe) {
    let _ = RECIPE.set(recipe);
}

/// The arguments for ranks, which are started with what the recipe said when it was read here.
pub(crate) fn arguments() -> Option<Vec<OsString>> {
    RECIPE.get().map(|recipe| recipe.arguments.clone())
}

/// Where the value of an option comes from, if it is from the recipe; the option is named as it is typed.
pub(crate) fn origin(option: &str) -> Option<String> {
    let recipe = RECIPE.get()?;
    let (_, line) = recipe.options.iter().find(|(name, _)| option.strip_prefix("--") == Some(name))?;
    Some(format!("{}: line {line}", recipe.path.display()))
}
