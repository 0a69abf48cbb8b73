//! Macros for the methods of a command that return its options.

/// Implements methods of [`Command`](crate::Command) by returning the fields of the same names: `common`, `checkpoints` and
/// `elastic`; or those of [`Experiment`](crate::Experiment): `epochs` or `steps` as its end.
#[macro_export]
macro_rules! options_of {
    (@common) => {
        fn common(&self) -> &$crate::options::CommonOptions {
            &self.common
        }

        fn with_common(&self, common: $crate::options::CommonOptions) -> Self {
            Self { common, ..self.clone() }
        }
    };
    (@checkpoints) => {
        fn checkpoints(&self) -> Option<&$crate::options::CheckpointOptions> {
            Some(&self.checkpoints)
        }

        fn check_checkpoint(&self, world_size: usize) -> $crate::error::Result<()> {
            $crate::Experiment::check_found(self, world_size)
        }
    };
    (@elastic) => {
        fn elastic_options(&self) -> Option<$crate::options::ElasticOptions> {
            Some(self.elastic)
        }
    };
    (@epochs) => {
        fn end(&self) -> $crate::trainer::RunEnd {
            $crate::trainer::RunEnd::Epochs(self.epochs)
        }
    };
    (@steps) => {
        fn end(&self) -> $crate::trainer::RunEnd {
            $crate::trainer::RunEnd::Steps(self.steps)
        }
    };
    ($($name:ident),*) => { $($crate::options_of!(@$name);)* };
}

/// Returns fields of a command as its [settings](crate::Command::settings), by the names of their options. A field
/// whose value is not displayed as it is takes another: `settings!(self, lr, batch_size, loss = "mse".into())` has `--lr`,
/// `--batch-size` and `--loss`.
#[macro_export]
macro_rules! settings {
    (@value $options:ident, $field:ident) => {
        $options.$field.to_string()
    };
    (@value $options:ident, $field:ident, $value:expr) => {
        $value
    };
    ($options:ident, $($field:ident $(= $value:expr)?),* $(,)?) => {
        vec![$(
            ($crate::options::option_of_field(stringify!($field)), $crate::settings!(@value $options, $field $(, $value)?))
        ),*]
    };
}
