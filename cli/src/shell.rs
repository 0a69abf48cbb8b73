//! Shell completions and man pages: the commands `completions` and `man`.

use std::fs::create_dir_all;
use std::io::{Write, stdout};
use std::path::PathBuf;

use clap::{Args, Command};
use clap_complete::Shell;
use clap_mangen::Man;
use training::FileError;

use crate::console::say;
use crate::error::{Error, Result};
use crate::outputs;

/// Options of `completions`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Prints a script that completes commands, options and their values when you press Tab. Load it in each
new shell, or write it to a folder that the shell reads at its start:

  girandole completions bash > ~/.local/share/bash-completion/completions/girandole
  girandole completions zsh > ~/.zfunc/_girandole
  girandole completions fish > ~/.config/fish/completions/girandole.fish

For zsh, put fpath+=~/.zfunc before compinit in ~/.zshrc. To try it in bash, type
source <(girandole completions bash).")]
pub struct CompletionsOptions {
    /// Shell to print the script for
    #[arg(value_enum, value_name = "SHELL")]
    shell: Shell,
}

impl CompletionsOptions {
    /// Prints the script.
    ///
    /// # Errors
    /// Standard output that cannot be written.
    pub fn run(&self, mut commands: Command) -> Result<()> {
        let name = commands.get_name().to_owned();
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut commands, name, &mut script);
        let mut out = stdout().lock();
        out.write_all(&script).and_then(|()| out.flush()).map_err(Error::Output)
    }
}

/// Options of `man`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Writes a man page for the program and for each command, in section 1. For `man girandole-pretrain` to
find them:

  girandole man ~/.local/share/man/man1")]
pub struct ManOptions {
    /// Folder to write the pages to; it is made if it does not exist
    #[arg(value_name = "DIR")]
    dir: PathBuf,
}

impl ManOptions {
    /// Writes the pages, and prints how many.
    ///
    /// # Errors
    /// A folder that cannot be made or written.
    pub fn run(&self, commands: Command) -> Result<()> {
        create_dir_all(&self.dir).map_err(|error| FileError::write(&self.dir, error))?;
        let mut program = commands.disable_help_subcommand(true);
        program.build();
        let subcommands: Vec<Command> = program.get_subcommands().cloned().collect();
        let pages: Vec<Man> = [program].into_iter().chain(subcommands).map(Man::new).collect();
        for page in &pages {
            let path = self.dir.join(page.get_filename());
            let mut text = Vec::new();
            page.render(&mut text).map_err(|error| FileError::write(&path, error))?;
            outputs::write(&path, text)?;
        }
        say(format_args!("man pages: {}, folder: {}", pages.len(), self.dir.display()))
    }
}
