"""Style sheet of the quality report's page."""

from typing import Final

STYLE: Final = """
:root{--ink:#1f2933;--soft:#5f6c7b;--line:#e1e6eb;--paper:#fff;--ground:#f4f6f8;--good:#1d7a46;--bad:#c8372d}
*{box-sizing:border-box}
body{margin:0 auto;padding:24px;max-width:1120px;background:var(--ground);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif;overflow-wrap:anywhere}
h1{font-size:26px;line-height:1.25;margin:4px 0 8px}h2{font-size:17px;margin:0 0 8px}p{margin:0 0 8px}
header{padding:20px 24px;border-radius:10px;color:#fff;background:var(--bad)}header.passed{background:var(--good)}
header p{margin:0;opacity:.92}.batch{font-size:13px}
.facts{display:grid;grid-template-columns:repeat(6,1fr);gap:1px;margin:16px 0;background:var(--line);
border:1px solid var(--line);border-radius:10px;overflow:hidden}
.facts div{background:var(--paper);padding:12px 16px}.facts b{display:block;font-size:18px;white-space:nowrap}
.facts span{color:var(--soft);font-size:13px}
.failure{display:grid;grid-template-columns:190px 1fr;gap:24px;background:var(--paper);border:1px solid var(--line);
border-left:6px solid var(--bad);border-radius:10px;padding:16px 20px;margin:0 0 12px}
.number b{display:block;font-size:26px;line-height:1.2;color:var(--bad)}
.number span{display:block;color:var(--soft);font-size:13px}
.look{background:var(--ground);border-radius:6px;padding:8px 12px}
.label{color:var(--soft);font-size:13px;margin:0}
.examples{list-style:none;margin:0;padding:0;display:flex;flex-wrap:wrap;gap:4px 8px}
code{font:12.5px/1.5 ui-monospace,"DejaVu Sans Mono",Menlo,monospace;background:var(--ground);border-radius:4px;
padding:1px 6px}
.pictures{display:grid;grid-template-columns:repeat(3,1fr);gap:12px;margin:16px 0}
figure{margin:0;min-width:0;background:var(--paper);border:1px solid var(--line);border-radius:10px;padding:12px 14px}
figcaption span{display:block;color:var(--soft);font-size:13px}
img{display:block;width:100%;height:auto;margin-top:8px}
table{border-collapse:collapse;width:100%;background:var(--paper);border:1px solid var(--line);border-radius:10px;
font-size:14px}
th{text-align:left;color:var(--soft);font-weight:600;font-size:13px}
th,td{padding:7px 12px;border-bottom:1px solid var(--line)}
tr:last-child td{border-bottom:0}
.num{text-align:right;white-space:nowrap}td.num{font-variant-numeric:tabular-nums}
.ok,.bad{display:inline-block;border-radius:99px;padding:1px 10px;white-space:nowrap;font-size:12.5px;
color:var(--good);background:#e3f3e9}
.bad{color:#fff;background:var(--bad)}
.tables{display:grid;grid-template-columns:1fr 1fr;gap:12px;margin:20px 0;align-items:start}
.tables div{margin:0 0 20px}h2.part{margin:20px 0 8px}
@media (max-width:760px){.facts{grid-template-columns:repeat(2,1fr)}.failure{grid-template-columns:1fr;gap:8px}
.pictures,.tables{grid-template-columns:1fr}}
"""
