#include <stdio.h>
extern int table[];
int main(void)
{
  int sum = 0;
  for (int *p = table; *p; p++)
    sum += *p;
  printf("sum %d\n", sum);
  return 0;
}
