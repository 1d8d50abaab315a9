//! Colours of charts, for light and for dark mode.

use super::COLOURS;

/// Colours that differ in lightness as well as in hue, so that colour-blind readers can distinguish
/// them; each with its counterpart for dark mode.
const PALETTE: [(&str, &str); COLOURS] = [
    ("#1f5fa8", "#6fb1f2"),
    ("#d2691e", "#f5a35c"),
    ("#2a8a5f", "#63cf9f"),
    ("#8b4a9c", "#cf97e0"),
    ("#b3293f", "#f0788a"),
    ("#6b6f00", "#c9cd4c"),
    ("#0e8390", "#54ccd9"),
    ("#6a5148", "#c0a397"),
];

/// The style sheet, without CSS variables, because some viewers do not support them.
pub(super) fn style() -> String {
    let colours = |of: fn(&(&'static str, &'static str)) -> &'static str| -> String {
        let both = |(index, pair)| {
            let colour = of(pair);
            format!(".s{index}{{stroke:{colour}}}.f{index}{{fill:{colour}}}")
        };
        PALETTE.iter().enumerate().map(both).collect()
    };
    format!("{LIGHT}{}{DARK}{}}}\n", colours(|pair| pair.0), colours(|pair| pair.1))
}

const LIGHT: &str = "\n\
    text{font:13px system-ui,-apple-system,\"Segoe UI\",Roboto,\"Helvetica Neue\",Arial,sans-serif;\
    fill:#5c5b57}\n\
    .paper{fill:#fdfdfb}.title{font-size:17px;font-weight:600;fill:#1d1d1b}\
    .what{font-size:13px}.end{text-anchor:end}.middle{text-anchor:middle}\
    .name{font-weight:600}.value{font-size:12px}\n\
    .grid{stroke:#e4e2dc;stroke-width:1}.base{stroke:#8f8d86;stroke-width:1}\
    .tick{stroke:#b9b7b0;stroke-width:1}.leader{stroke-width:1;fill:none;opacity:.45}\
    .line{fill:none;stroke-width:2.4;stroke-linejoin:round;stroke-linecap:round}\
    .under{stroke-width:9;opacity:.4}.dot{stroke:#fdfdfb;stroke-width:1.4}\n\
    .d1{stroke-dasharray:7 5}.d2{stroke-dasharray:2 5}.d3{stroke-dasharray:10 4 2 4}\n";

const DARK: &str = "\n@media (prefers-color-scheme:dark){text{fill:#aeaca5}.paper{fill:#171716}\
    .title{fill:#f0efea}.grid{stroke:#2c2b29}.base{stroke:#76746d}.tick{stroke:#55534e}\
    .dot{stroke:#171716}\n";
