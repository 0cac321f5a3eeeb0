"""Style of report.html: light or dark as the browser prefers, without external fonts, scripts or images."""

from colocated_grpo.tracking.text import as_html

LIGHT = ("#2f6fde", "#e07b1a", "#1f9d6b", "#b04ac4", "#c9a400", "#d6456b", "#2aa6b8", "#7a8b2f", "#8a6d5c", "#9aa3af")
DARK = ("#6ea2ff", "#f59b4a", "#45c993", "#d184e3", "#e6c94b", "#f2789a", "#5ccfe0", "#aabf56", "#bd9c88", "#6b7480")
"""One colour per series; the last is for "other"."""


def _variables(colors: tuple[str, ...]) -> str:
    return "".join(f"--s{index}:{color};" for index, color in enumerate(colors))


_SERIES = "".join(
    f".l{index}{{stroke:var(--s{index})}}.f{index}{{fill:var(--s{index})}}.b{index}{{background:var(--s{index})}}"
    for index in range(len(LIGHT))
)

STYLE = f"""
:root{{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--ink:#1b2430;--quiet:#66707f;--edge:#e2e6eb;--code:#f3f5f8;
--hover:rgba(30,60,110,.10);--bad:#b3261e;--badpage:#fdeceb;--mine:#e3edfd;{_variables(LIGHT)}}}
@media (prefers-color-scheme:dark){{:root{{--page:#12161c;--card:#1a2029;--ink:#e5eaf1;--quiet:#93a0b0;--edge:#2b333f;
--code:#141a22;--hover:rgba(160,190,240,.14);--bad:#ff8a80;--badpage:#3a1d1d;--mine:#20344f;{_variables(DARK)}}}}}
*{{box-sizing:border-box}}
body{{margin:0;background:var(--page);color:var(--ink);font:15px/1.45 system-ui,-apple-system,"Segoe UI",sans-serif}}
main{{max-width:1240px;margin:0 auto;padding:28px 20px 60px}}
h1{{font-size:26px;margin:0 0 2px}}h2{{font-size:18px;margin:36px 0 12px}}h3{{font-size:14px;margin:0;flex-basis:100%}}
.quiet{{color:var(--quiet);font-weight:400}}p.quiet{{margin:0 0 18px}}p.constant{{margin-top:18px}}
.tiles{{display:grid;grid-template-columns:repeat(auto-fit,minmax(160px,1fr));gap:12px}}
.tile,figure,.card,details{{background:var(--card);border:1px solid var(--edge);border-radius:10px}}
.tile{{padding:12px 14px;display:flex;flex-direction:column}}
.tile span,.tile small{{color:var(--quiet);font-size:13px}}.tile strong{{font-size:16px;white-space:nowrap}}
.charts{{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,380px),1fr));gap:14px}}
figure{{margin:0;padding:12px 12px 6px}}
figcaption{{display:flex;flex-wrap:wrap;gap:2px 12px;font-size:13px;min-height:44px;align-content:flex-start}}
figcaption i{{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:5px}}
svg{{width:100%;height:auto;display:block}}svg text{{fill:var(--quiet);font-size:12px}}
.grid{{stroke:var(--edge);stroke-width:1}}
polyline{{fill:none;stroke-width:2;stroke-linejoin:round}}.raw{{stroke-width:1;opacity:.35}}
.hit{{fill:transparent}}.hit:hover{{fill:var(--hover)}}
{_SERIES}
.card{{padding:12px 14px;margin-bottom:12px}}.sides{{display:grid;gap:14px;margin-top:10px}}
.n2{{grid-template-columns:1fr 1fr}}@media (max-width:720px){{.n2{{grid-template-columns:1fr}}}}
.sides>div{{min-width:0}}.label{{font-size:13px;color:var(--quiet);margin-bottom:4px;overflow-wrap:anywhere}}
.reward{{color:var(--ink);font-size:15px;margin-right:6px}}
pre{{margin:0;padding:8px 10px;background:var(--code);border-radius:6px;
font:13px/1.4 ui-monospace,Menlo,Consolas,monospace;
white-space:pre-wrap;overflow-wrap:anywhere;max-height:260px;overflow:auto;min-height:2.4em}}
pre.game{{max-height:560px;margin:10px 0}}
.verdict{{font-size:17px;margin:0 0 18px;max-width:900px}}
.failure{{border:1px solid var(--bad);border-left-width:6px;background:var(--badpage);border-radius:10px;
padding:12px 14px;margin:0 0 18px;overflow-wrap:anywhere}}
.failure strong{{display:block;color:var(--bad)}}
.bar{{display:flex;height:22px;border-radius:6px;overflow:hidden}}.bar i{{display:block}}
.legend{{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:13px;margin:8px 0 0}}
.legend i{{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:5px}}
.meaning{{color:var(--quiet);font-size:12px;margin:2px 0 4px}}
.chat{{display:flex;flex-direction:column;gap:8px;align-items:flex-start}}
.bubble{{max-width:92%;border-radius:10px;padding:6px 10px;border:1px solid var(--edge);
background:var(--code);min-width:0}}
.bubble span{{font-size:12px;color:var(--quiet)}}.bubble pre{{padding:0;background:none;min-height:0;max-height:260px}}
.bubble.sampled{{align-self:flex-end;background:var(--mine);border-color:var(--mine)}}
.sides{{align-items:start}}
details{{padding:10px 14px;margin-bottom:10px}}summary{{cursor:pointer}}
table{{border-collapse:collapse;margin-top:10px;font-size:13px;width:100%}}
td{{border-top:1px solid var(--edge);padding:3px 10px 3px 0;vertical-align:top;overflow-wrap:anywhere}}
td:first-child{{width:32%}}
"""


def section(title: str, content: str) -> str:
    """Return a section with a heading. `content` is HTML, `title` is plain text."""
    return f"<section><h2>{as_html(title)}</h2>{content}</section>"
